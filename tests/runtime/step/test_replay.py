"""Captured steps: the same logits and tokens in every mode, padding that touches nothing."""

from __future__ import annotations

import functools
import re
import weakref
from dataclasses import replace

import pytest
import torch
from support_core import core_of
from support_engines import eager_llm
from support_models import opt_o2, tiny_model, tiny_traced
from support_pooling import engine, random_texts, vectors, write_pooled

from girih import SamplingParams
from girih.graph.execute.batch_descriptor import BatchDescriptor
from girih.graph.execute.executable import Executable
from girih.graph.execute.static_step import StaticMemory, StaticSteps
from girih.graph.execute.step_inputs import StepInputs
from girih.graph.files.sources import resolve_source
from girih.graph.ir.program import EagerSpec, EagerStep
from girih.graph.tiles.inductor import eager_tile
from girih.graph.tiles.settings import MAX_STEP_TOKENS
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import ConfigError, EngineError
from girih.kernels.base.target import Target, detect_isa
from girih.passes.build.build import lower_and_partition
from girih.runtime.observe.metrics import EngineMetrics
from girih.runtime.records.config import RuntimeConfig, SchedulerConfig
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.step.replay import manage_replays

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 24, 96
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48)


@functools.cache
def parts(kind="llama"):
    target = Target("cpu", detect_isa(), 2, "g++")
    _, program = lower_and_partition(tiny_traced(kind), opt_o2(), target)
    tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
    with open_checkpoint(resolve_source(str(tiny_model(kind)))) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, target.isa)
    return program.layout, tiles, weights


def bound(kind="llama"):
    layout, tiles, weights = parts(kind)
    return Executable(layout, dict(tiles), weights, NUM_BLOCKS, BLOCK, torch.float32, "reference")


def managed(replay, kind="llama", **settings):
    return manage_replays(bound(kind), RuntimeConfig(replay=replay, **settings), LIMITS, MAX_LEN)


class Traffic:
    """Sequences with blocks of their own; makes the same steps for any manager."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        draw = functools.partial(torch.randint, 3, 400, generator=generator)
        self.ids = [draw((MAX_LEN,)).tolist() for _ in range(count)]
        self.blocks = [[1 + 6 * i + k for k in range(6)] for i in range(count)]
        self.done = [0] * count

    def step(self, counts, rows=None):
        """Inputs of a step with `counts[i]` tokens of sequence i (0: it takes no part)."""
        ids, positions, slots, starts, lengths, table = [], [], [], [0], [], []
        for i, count in enumerate(counts):
            if not count:
                continue
            begin, end = self.done[i], self.done[i] + count
            ids += self.ids[i][begin:end]
            positions += range(begin, end)
            slots += [self.blocks[i][p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, end)]
            starts.append(len(ids))
            lengths.append(end)
            table.append(self.blocks[i])
            self.done[i] = end
        wanted = [s - 1 for s in starts[1:]] if rows is None else rows
        int32 = functools.partial(torch.tensor, dtype=torch.int32)
        return StepInputs(
            ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            logits_index=torch.tensor(wanted, dtype=torch.int64),
            attention=AttentionMetadata(
                query_start=int32(starts),
                seq_lens=int32(lengths),
                block_tables=(int32(table)[:, : -(-max(lengths) // BLOCK)],),
                slot_mappings=(torch.tensor(slots),),
            ),
        )


PLANS = [
    ([20, 3, 0], None),  # a prefill, mixed
    ([0, 0, 17], []),  # a chunk whose logits nobody wants
    ([1, 1, 0], None),
    ([1, 1, 1], None),
    ([2, 1, 1], [0, 1, 2, 3]),  # every row
    ([1, 1, 1], None),
    ([0, 1, 0], None),
    ([1, 1, 1], []),
    ([1, 1, 1], [2, 0]),
] * 2  # the second time every shape is replayed


def run_all(manager, plans=PLANS):
    traffic = Traffic(3)
    with torch.inference_mode():
        return [manager.run(traffic.step(counts, rows)).clone() for counts, rows in plans]


@functools.cache
def expected(kind="llama"):
    return run_all(managed("none", kind))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("replay", ["piecewise", "full"])
def test_logits_are_those_of_the_dynamic_path(replay, kind):
    manager = managed(replay, kind)
    for found, wanted in zip(run_all(manager), expected(kind), strict=True):
        close(found, wanted)
    stats = manager.stats()
    assert stats.steps["none"] == {}
    assert bool(stats.steps["full"]) == (replay == "full")
    assert stats.num_captured == len(PLANS)
    assert sum(stats.captures.values()) < len(PLANS) / 2


def test_counters_add_up():
    manager = managed("full", replay_requests=(2,), replay_tokens=(8, 24))
    run_all(manager, [([20, 3, 0], None), ([1, 1, 0], None), ([1, 0, 0], None), ([1, 1, 1], None)])
    with torch.inference_mode():
        manager.run(Traffic(1).step([25]))
    stats = manager.stats()
    assert stats.steps == {"full": {"2": 2}, "piecewise": {"24": 1, "8": 1}, "none": {"": 1}}
    assert stats.tokens == {"full": 3, "piecewise": 26, "none": 25}
    assert stats.padded_tokens == {"full": 1, "piecewise": 1 + 5, "none": 0}
    assert stats.captures == {"full": 1, "piecewise": 2, "none": 0}
    assert stats.misses == {"full": {"mixed": 2, "requests": 1}, "piecewise": {"tokens": 1}}
    assert (stats.num_steps, stats.num_captured, stats.num_padded) == (5, 4, 7)
    assert manager.explanation == (
        "none; not full: 1 requests have 25 tokens, not one each; "
        "not piecewise: 25 tokens, the largest bucket holds 24"
    )


@pytest.mark.parametrize("replay", ["piecewise", "full"])
def test_padding_reads_and_writes_no_kv(replay):
    """Every slot that is not written holds NaN, and so does whatever a padded row might read."""
    manager = managed(replay, replay_tokens=(40,), replay_requests=(8,))
    caches = [tensor for pair in manager.executable._caches for tensor in pair]
    for cache in caches:
        cache.fill_(torch.nan)
    traffic = Traffic(3)
    with torch.inference_mode():
        for counts in ([20, 3, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]):
            assert manager.run(traffic.step(counts)).isfinite().all()
    padded = {"piecewise": 16 + 37 + 38 + 37, "full": 16 + 5 + 6 + 5}
    assert manager.stats().num_padded == padded[replay]
    written = {(b, p % BLOCK) for i, blocks in enumerate(traffic.blocks)
               for p in range(traffic.done[i]) for b in [blocks[p // BLOCK]]}  # fmt: skip
    for keys, values in manager.executable._caches:
        for found in (keys.movedim(3, 1), values.movedim(2, 1)):  # [blocks, slots, ...]
            is_written = found.isfinite().flatten(2).all(-1)
            assert found.flatten(2)[~is_written].isnan().all()
            assert {tuple(place) for place in is_written.nonzero().tolist()} == written


def test_nothing_is_left_of_the_step_before():
    manager = managed("full")
    run_all(manager)
    with torch.inference_mode():
        for slabs in manager._capture._memory._slabs.values():
            for slab in slabs:
                slab.fill_(255)  # NaN in float32
    for found, wanted in zip(run_all(manager), expected(), strict=True):
        close(found, wanted)


def test_a_replay_uses_the_same_addresses_and_all_shapes_share_them():
    manager = managed("full", replay_tokens=(8, 48), replay_requests=(4, 8))
    traffic = Traffic(3)
    with torch.inference_mode():
        manager.run(traffic.step([30, 4, 1]))
        size = manager.stats().buffer_bytes
        manager.run(traffic.step([3, 1, 1]))
        assert manager.stats().buffer_bytes == size
        addresses = {manager.run(traffic.step([1, 1, 1])).data_ptr() for _ in range(3)}
        addresses.add(manager.run(traffic.step([1, 1, 0])).data_ptr())
    assert len(addresses) == 1


def test_buffers_go_back_and_are_taken_again():
    memory = StaticMemory(64)
    memory.begin()
    first = memory.take((8, 4), torch.float32, 8)
    second = memory.take((8, 4), torch.float32, 8)
    assert first.data_ptr() != second.data_ptr()
    memory.give_back(first)
    memory.give_back(torch.zeros(3))
    third = memory.take((8, 2), torch.float64, 8)
    assert third.data_ptr() == first.data_ptr()
    assert memory.num_bytes == 2 * 64 * 16
    memory.begin()
    assert memory.take((64, 4), torch.float32, 64).data_ptr() in (
        first.data_ptr(), second.data_ptr(),
    )  # fmt: skip
    assert memory.num_bytes == 2 * 64 * 16


@pytest.mark.parametrize("change", ["tile", "weights", "attention", "restart"])
def test_captures_go_when_what_they_are_bound_to_changes(change):
    manager = managed("full")
    executable = manager.executable
    run_all(manager)
    gone = weakref.ref(next(iter(manager._replays.values())))
    weights = {name: tensor.clone() for name, tensor in executable.weights().items()}
    if change == "tile":
        key = next(iter(executable.layout.tile_counts))
        executable.replace_tile(key, executable.tile(key))
    elif change == "weights":
        name = next(n for n, t in weights.items() if t.dim() > 1)
        weights[name] = weights[name].flip(0)
        executable.set_weights(weights)
    elif change == "attention":
        executable.choose_attention("reference")
    else:
        executable.release(with_tiles=False)
        assert manager.stats().buffer_bytes == 0
        executable.restore(weights)
    assert gone() is None
    captured = sum(manager.stats().captures.values())
    found = run_all(manager)
    assert sum(manager.stats().captures.values()) == 2 * captured
    other = managed("none")
    other.executable.set_weights(weights)
    for a, b, before in zip(found, run_all(other), expected(), strict=True):
        close(a, b)
        assert change != "weights" or not len(a) or not torch.allclose(a, before, atol=1e-2)


def test_a_step_that_fails_while_it_is_captured_leaves_no_half_capture():
    manager = managed("full")
    executable, traffic = manager.executable, Traffic(1)
    key = list(executable.layout.tile_counts)[-1]
    right = executable.tile(key)

    def fail(inputs):
        raise RuntimeError("broken")

    executable.replace_tile(key, fail)
    with torch.inference_mode():
        step = traffic.step([1])
        with pytest.raises(RuntimeError, match="broken"):
            manager.run(step)
        executable._tiles[key] = right  # mended without telling
        close(manager.run(step), managed("none").run(step))


@pytest.mark.parametrize("replay", ["none", "piecewise", "full"])
@pytest.mark.parametrize("count", [0, MAX_STEP_TOKENS + 1])
def test_step_sizes_that_code_was_not_compiled_for(replay, count):
    empty = torch.zeros(count, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int32)
    request = AttentionMetadata(torch.tensor([0, count]).int(), one, (one[None],), (empty,))
    inputs = StepInputs(empty, empty, empty[:0], request)
    with pytest.raises(EngineError, match=f"has {count} tokens; compiled code takes 1 to"):
        managed(replay).run(inputs)


@pytest.mark.parametrize("shape", [BatchDescriptor(4), BatchDescriptor(2, 2, is_uniform=True)])
def test_a_captured_step_refuses_what_does_not_fit_it(shape):
    captured = StaticSteps(bound(), 8, 6).capture(shape)
    with pytest.raises(EngineError, match=r"5 tokens of 3 requests do not fit BatchDescriptor"):
        captured.run(Traffic(3).step([3, 1, 1]))


def test_programs_that_cannot_be_captured_say_why():
    executable = bound()
    steps = StaticSteps(executable, 8, 6)
    assert (steps.why_not(True), steps.why_not(False)) == (None, None)
    layout = executable.layout
    spec = EagerSpec("m", "M", "m.py:1", "it asks for values", "model.m", (), "()")
    executable.layout = replace(layout, steps=(EagerStep(spec, (), (), ()), *layout.steps))
    for is_whole in (True, False):
        assert steps.why_not(is_whole) == "modules that stay eager see all rows, padding too"
    executable.layout = replace(layout, steps=layout.steps * 2)
    assert steps.why_not(False) == "rows are selected before the last piece"


def test_buckets_that_nothing_fills_are_refused():
    with pytest.raises(ConfigError, match=r"replay_tokens ends at 64; .* steps of 48 at most"):
        managed("piecewise", replay_tokens=(16, 64))
    with pytest.raises(ConfigError, match=r"replay_requests ends at 9; .* steps of 8 at most"):
        managed("full", replay_requests=(9,))


# ---- engines ----

ENGINE = {
    "dtype": "float32", "threads": 1, "block_size": 16, "max_num_seqs": 4,
    "max_num_batched_tokens": 32, "max_model_len": 96,
}  # fmt: skip
PROMPTS = [[5 + i, 6, 7, 8] * n for i, n in enumerate((12, 1, 5, 9, 3))]


# Llama has few blocks: requests are preempted.
@pytest.mark.parametrize(("kind", "num_blocks"), [("llama", 8), ("gemma3_text", 40)])
def test_engines_give_equal_tokens_in_all_modes(kind, num_blocks):
    common = {"max_tokens": 30, "ignore_eos": True, "seed": 3}
    asked = [SamplingParams(temperature=t, **common) for t in (0, 0.8, 0, 1.1)]
    asked.append(SamplingParams(temperature=0, prompt_logprobs=1, **common))
    llm = eager_llm(tiny_model(kind), num_blocks=num_blocks, **ENGINE)
    core, found = core_of(llm), {}
    for replay in ("none", "piecewise", "full"):
        config = RuntimeConfig(replay=replay)
        replays = manage_replays(core.runner.executable, config, core.scheduler.config, 96)
        core.runner.replays, core.replay_stats = replays, replays.stats
        before = core.stats()
        results = llm.generate(PROMPTS, asked)
        found[replay] = [o.outputs[0].token_ids for o in results]
        found[replay].append([p.token_id for p in results[-1].prompt_logprobs[1:]])
        stats = core.stats()
        assert stats.num_preemptions > before.num_preemptions or kind != "llama"
        assert stats.replay.num_steps == stats.num_steps - before.num_steps
        assert stats.replay.num_captured == (0 if replay == "none" else stats.replay.num_steps)
        assert bool(stats.replay.steps["full"]) == (replay == "full")
        core.reset_prefix_cache()
    llm.close()
    assert found["none"] == found["piecewise"] == found["full"]


def test_a_sleeping_engine_keeps_no_captured_step(tmp_path):
    trace = tmp_path / "trace.json"
    options = {"replay": "full", "trace": str(trace), "num_blocks": 40, **ENGINE}
    llm = eager_llm(tiny_model("llama"), **options)
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, asked)]
    weight = weakref.ref(next(iter(core_of(llm).runner.executable.weights().values())))
    llm.sleep()
    assert weight() is None
    text = EngineMetrics(core_of(llm), "tiny", 96).text()
    labels = 'engine="0",mode="full",model_name="tiny"'
    assert f"girih:replay_tokens_total{{{labels}}} " in text
    assert f'girih:replay_steps_total{{bucket="4",{labels}}} ' in text
    assert (
        'girih:replay_misses_total{engine="0",mode="full",model_name="tiny",reason="mixed"} '
        in text
    )
    assert 'girih:replay_buffer_bytes{engine="0",model_name="tiny"} 0.0' in text
    assert core_of(llm).stats().replay.buffer_bytes == 0
    llm.wake()
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, asked)] == before
    llm.close()
    modes = set(re.findall(r'"name":"run".*"mode":"([^"]*)"', trace.read_text()))
    assert "full 4 (4 tokens)" in modes
    assert "piecewise 32 (32 tokens); not full: 1 requests have 32 tokens, not one each" in modes


def test_texts_are_embedded_alike_in_captured_pieces(tmp_path):
    write_pooled(tmp_path, "llama", "generate")
    texts, found = random_texts((30, 9, 1)), {}
    for replay in ("none", "full"):
        handle = engine(
            tmp_path, task="embed", pooling="mean", max_num_batched_tokens=16, replay=replay
        )
        found[replay] = vectors(handle, texts)
        stats = handle.core.stats().replay
    assert stats.steps["full"] == {}
    assert stats.num_captured == stats.num_steps > 2
    assert set(stats.misses["full"]) == {"unsupported"}  # the mean is a recurrence
    for a, b in zip(found["none"], found["full"], strict=True):
        assert abs(a - b).max() < 2e-5


def test_types_of_a_pair_reach_captured_pieces(tmp_path):
    write_pooled(tmp_path, "bert", "classify", num_labels=1)
    texts = random_texts()
    asked = [PoolingParams(token_types=[0] * 5 + [1] * (len(ids) - 5)) for ids in texts]
    plain = vectors(engine(tmp_path), texts, asked)
    handle = engine(tmp_path, replay="piecewise")
    vectors(handle, texts)
    for a, b in zip(plain, vectors(handle, texts, asked), strict=True):
        assert abs(a - b).max() < 2e-5
