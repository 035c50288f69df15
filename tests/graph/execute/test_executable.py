"""Bound programs step by step against Hugging Face: packed sequences, chunks, decode."""

import dataclasses
import functools

import pytest
import torch
from support_models import hf_config, hf_model, opt_o2, tiny_model, tiny_traced

from girih.graph.execute.executable import Executable, kv_cache_specs
from girih.graph.execute.step_inputs import StepInputs
from girih.graph.files.sources import resolve_source
from girih.graph.tiles.inductor import eager_tile
from girih.graph.tiles.settings import MAX_STEP_TOKENS
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import ConfigError, EngineError
from girih.kernels.base.target import Target, detect_isa
from girih.kernels.kv.groups import one_group
from girih.passes.build.build import lower_and_partition
from girih.passes.options import OptConfig

BLOCK = 16
KINDS = ["llama", "qwen3", "gemma3_text", "gpt2", "cohere"]


@functools.cache
def parts(kind, level):
    # The layout of the library that another test may have loaded; the references read any.
    target = Target("cpu", detect_isa(), 2, "g++")
    opt = OptConfig()
    opt.passes.canonicalize.enabled = True
    if level == "O2":
        opt = opt_o2()
    _, program = lower_and_partition(tiny_traced(kind), opt, target)
    tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
    with open_checkpoint(resolve_source(str(tiny_model(kind)))) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, target.isa)
    return program, tiles, weights


def bound(kind="llama", level="O2", num_blocks=40):
    program, tiles, weights = parts(kind, level)
    return Executable(program.layout, tiles, weights, num_blocks, BLOCK, torch.float32, "reference")


@functools.cache
def reference(kind):
    return hf_model(hf_config(kind))


def expected(kind, tokens):
    with torch.no_grad():
        return reference(kind)(torch.tensor([tokens])).logits[0]


class Sequence:
    """A sequence with blocks of its own, in any order."""

    def __init__(self, tokens, blocks):
        self.tokens, self.blocks, self.computed = list(tokens), blocks, 0


def step(executable, plan, wanted=None):
    """Run [(sequence, number of tokens)]; logits of each last token, or of rows `wanted`."""
    ids, positions, slots, starts, lengths = [], [], [], [0], []
    for sequence, count in plan:
        begin, end = sequence.computed, sequence.computed + count
        ids += sequence.tokens[begin:end]
        positions += range(begin, end)
        slots += [sequence.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, end)]
        starts.append(len(ids))
        lengths.append(end)
        sequence.computed = end
    width = max(len(s.blocks) for s, _ in plan)
    table = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in plan]
    rows = [s - 1 for s in starts[1:]] if wanted is None else wanted
    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    with torch.no_grad():
        return executable.run(
            StepInputs(
                ids=torch.tensor(ids),
                positions=torch.tensor(positions),
                logits_index=torch.tensor(rows, dtype=torch.int64),
                attention=AttentionMetadata(
                    query_start=int32(starts),
                    seq_lens=int32(lengths),
                    block_tables=(int32(table),),
                    slot_mappings=(torch.tensor(slots),),
                ),
            )
        )


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 400, (count,), generator=generator).tolist()


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_packed_sequences(kind, level):
    executable = bound(kind, level)
    sequences = [
        Sequence(tokens(21, 1), [7, 3]),
        Sequence(tokens(1, 2), [5]),
        Sequence(tokens(33, 3), [9, 1, 2]),
    ]
    logits = step(executable, [(s, len(s.tokens)) for s in sequences])
    assert logits.shape == (3, 424)
    for row, sequence in zip(logits, sequences, strict=True):
        close(row, expected(kind, sequence.tokens)[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_then_decode(kind):
    executable = bound(kind)
    one, other = Sequence(tokens(40, 4), [4, 2, 6]), Sequence(tokens(20, 5), [8, 1])
    assert step(executable, [(one, 17)], wanted=[]).shape[0] == 0
    [second] = step(executable, [(one, 20), (other, 7)], wanted=[19])
    close(second, expected(kind, one.tokens[:37])[-1])
    for _ in range(3):  # single tokens of two requests: T = 2
        got = step(executable, [(one, 1), (other, 1)])
        close(got[0], expected(kind, one.tokens[: one.computed])[-1])
        close(got[1], expected(kind, other.tokens[: other.computed])[-1])
    [last] = step(executable, [(other, 10)])
    close(last, expected(kind, other.tokens)[-1])


def test_one_token():
    executable, sequence = bound(), Sequence(tokens(3), [1])
    for _ in range(3):
        [row] = step(executable, [(sequence, 1)])
        close(row, expected("llama", sequence.tokens[: sequence.computed])[-1])


def test_logits_of_every_token():
    executable, sequence = bound(), Sequence(tokens(19), [3, 1])
    got = step(executable, [(sequence, 19)], wanted=list(range(19)))
    close(got, expected("llama", sequence.tokens))


def test_rows_in_any_order_and_repeated():
    executable, sequence = bound(), Sequence(tokens(19), [3, 1])
    got = step(executable, [(sequence, 19)], wanted=[18, 2, 2])
    close(got, expected("llama", sequence.tokens)[[18, 2, 2]])


def test_a_step_without_logits_fills_the_cache():
    executable, sequence = bound(), Sequence(tokens(30), [3, 1])
    empty = step(executable, [(sequence, 29)], wanted=[])
    assert empty.shape == (0, 1)
    close(step(executable, [(sequence, 1)])[0], expected("llama", sequence.tokens)[-1])


def test_blocks_are_shared_between_requests():
    executable, first = bound(), Sequence(tokens(20), [3, 1])
    step(executable, [(first, 20)])
    second = Sequence(first.tokens[:16] + tokens(9, 6), [3, 2])
    second.computed = 16
    close(step(executable, [(second, 9)])[0], expected("llama", second.tokens)[-1])


def test_padding_tokens_write_nothing():
    executable, sequence = bound(), Sequence(tokens(16), [3])
    step(executable, [(sequence, 15)])
    inputs = StepInputs(
        ids=torch.tensor([sequence.tokens[15], 9]),
        positions=torch.tensor([15, 0]),
        logits_index=torch.tensor([0]),
        attention=AttentionMetadata(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([16], dtype=torch.int32),
            block_tables=(torch.tensor([[3]], dtype=torch.int32),),
            slot_mappings=(torch.tensor([3 * BLOCK + 15, -1]),),
        ),
    )
    with torch.no_grad():
        close(executable.run(inputs)[0], expected("llama", sequence.tokens)[-1])


@pytest.mark.parametrize("count", [0, MAX_STEP_TOKENS + 1])
def test_step_sizes_that_code_was_not_compiled_for(count):
    empty = torch.zeros(count, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int32)
    request = AttentionMetadata(torch.tensor([0, count]).int(), one, (one[None],), (empty,))
    inputs = StepInputs(empty, empty, empty[:0], request)
    with pytest.raises(EngineError, match=f"has {count} tokens; compiled code takes 1 to"):
        bound().run(inputs)


def test_bytes_of_a_block():
    program, _, _ = parts("llama", "O2")
    # 2 layers, keys and values, 2 heads of 16 numbers, 16 slots, 4 bytes
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        plan = one_group(kv_cache_specs(program.layout, dtype), BLOCK)
        assert plan.block_bytes == 2 * 2 * 2 * 16 * 16 * size


def test_tables_for_people():
    executable = bound()
    assert executable.attention_report() == "attention reference × 2"
    assert "(40 blocks of 16 tokens, 8.0 KiB each, float32)" in executable.memory_table()


def test_heads_that_no_backend_runs_are_refused():
    program, tiles, weights = parts("llama", "O2")
    steps = tuple(
        dataclasses.replace(s, spec=dataclasses.replace(s.spec, head_dim=12))
        if hasattr(s, "spec")
        else s
        for s in program.layout.steps
    )
    layout = dataclasses.replace(program.layout, steps=steps)
    with pytest.raises(ConfigError, match="head_dim 12 is not a multiple of 8"):
        Executable(layout, tiles, weights, 4, BLOCK, torch.float32)


def test_values_are_freed_after_their_last_use():
    executable, sequence = bound(), Sequence(tokens(8), [1])
    kept = []
    watched = dict(executable._tiles)
    import weakref

    for key, run in watched.items():

        def call(inputs, run=run):
            results = run(inputs)
            kept.extend(weakref.ref(r) for r in results)
            return results

        executable._tiles = {**executable._tiles, key: call}
    logits = step(executable, [(sequence, 8)])
    alive = [r() for r in kept if r() is not None]
    assert [a is logits for a in alive] == [True]
