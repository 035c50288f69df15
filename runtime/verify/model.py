"""Level "model": a program computes what transformers computes: packed prefill, chunks, decode.

A model in float32 is compiled, bound to paged memory and run as a server would: sequences of
different lengths packed into steps, prompts in two uneven chunks, then greedy decoding together.
transformers' eager model computes each whole sequence alone, without a cache.
"""

from __future__ import annotations

import functools
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from girih.graph.execute.executable import Executable
from girih.graph.execute.step_inputs import StepInputs
from girih.graph.ir.program import ProgramLayout
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.tiles.inductor import TileFn
from girih.kernels.attention.metadata import AttentionMetadata

BLOCK = 16
NEW_TOKENS = 16
LENGTHS = (21, 9, 30)
TOLERANCE = 2e-4
"""Largest difference of two logits, as a part of the largest logit (at least 1)."""
LEAST_SPREAD = 1e-2


@dataclass(frozen=True)
class ModelResult(VerifyResult):
    """The result of a comparison with transformers.

    Attributes:
        spread: how much the logits vary over tokens: those that hardly do show nothing.
        num_tokens: tokens chosen, 0 for an encoder.
        num_same: of these, how many transformers chooses too, near-ties aside.
    """

    spread: float = 0.0
    num_tokens: int = 0
    num_same: int = 0


def spread_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model random weights that let every position matter (initial ones hardly do)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                noise = torch.empty_like(parameter).normal_(generator=generator)
                parameter.add_(noise, alpha=0.1)
            elif "embed" in name or "wte" in name:
                parameter.normal_(generator=generator)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    model.tie_weights()  # type: ignore[operator]


def bind(
    layout: ProgramLayout,
    tiles: dict[str, TileFn],
    weights: dict[str, torch.Tensor],
    attention: str | None = None,
) -> Executable:
    """A program with memory for the sequences of `verify_model`."""
    blocks = 1 + len(LENGTHS) * -(-(max(LENGTHS) + NEW_TOKENS) // BLOCK)
    slots = len(LENGTHS) + 1
    return Executable(
        layout, tiles, weights, blocks, BLOCK, torch.float32, attention, num_state_slots=slots
    )


def verify_model(model: Any, executable: Executable, vocab_size: int, encodes: bool) -> ModelResult:
    """Run both on the same random prompts.

    Args:
        model: transformers' model with the same weights, float32, eager attention.
        executable: from `bind`.
        vocab_size: token ids are drawn below it.
        encodes: hidden states of whole sequences are compared; nothing is generated.

    Returns:
        The largest difference of any logit (hidden state of an encoder), and where it failed.
    """
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(7)
    sequences = [
        _Sequence(n, torch.randint(3, vocab_size, (length,), generator=generator).tolist())
        for n, length in enumerate(LENGTHS)
    ]
    (_encode if encodes else _generate)(executable, sequences)
    expected = [_reference(model, s, encodes) for s in sequences]
    found = [torch.stack(s.logits) for s in sequences]
    scale = max(1.0, max(float(e.abs().max()) for e in expected))
    error = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    spread = max(float(e.std(0).mean()) for e in expected)
    num_tokens = 0 if encodes else NEW_TOKENS * len(sequences)
    num_same = 0
    if not encodes:
        pairs = zip(expected, found, strict=True)
        num_same = sum(_num_same(e, f, scale) for e, f in pairs)
    bound, what = TOLERANCE * scale, "hidden states" if encodes else "logits"
    where = ""
    if not error <= bound:
        where = _first_row(expected, found, bound, what)
    elif num_same < num_tokens:
        where = f"{num_tokens - num_same} of {num_tokens} greedy tokens are others"
    elif spread < LEAST_SPREAD:
        where = f"inconclusive: {what} hardly depend on the input (spread {spread:.1e})"
    return ModelResult(
        "model",
        f"{what} of {len(sequences)} sequences with transformers",
        error,
        bound,
        time.perf_counter() - started,
        where,
        spread=spread,
        num_tokens=num_tokens,
        num_same=num_same,
    )


def _first_row(
    expected: list[torch.Tensor], found: list[torch.Tensor], bound: float, what: str
) -> str:
    """The first sequence, and its first row, with a difference beyond the bound."""
    for number, (wanted, rows) in enumerate(zip(expected, found, strict=True)):
        wrong = ~((wanted - rows).abs().amax(-1) <= bound)
        if bool(wrong.any()):
            return f"{what} {int(wrong.nonzero()[0])} of sequence {number}"
    raise AssertionError("the largest difference is beyond the bound")


class _Sequence:
    """One prompt, its memory, and the logits of each step."""

    def __init__(self, number: int, tokens: list[int]) -> None:
        blocks = -(-(len(tokens) + NEW_TOKENS) // BLOCK)
        self.tokens, self.computed = tokens, 0
        self.blocks = [1 + number + len(LENGTHS) * i for i in range(blocks)]
        self.slot = len(LENGTHS) - number
        self.logits: list[torch.Tensor] = []


def _num_same(expected: torch.Tensor, found: torch.Tensor, scale: float) -> int:
    """Count the chosen tokens that transformers chooses too, near-ties aside."""
    chosen = found.argmax(-1, keepdim=True)
    gap = expected.max(-1).values - expected.gather(-1, chosen)[:, 0]
    return int((gap <= TOLERANCE * scale).sum())


def _encode(executable: Executable, sequences: list[_Sequence]) -> None:
    lengths = [len(s.tokens) for s in sequences]
    rows = executable.run(_inputs(sequences, lengths, list(range(sum(lengths)))))
    for sequence, part in zip(sequences, rows.split(lengths), strict=True):
        sequence.logits = list(part)


def _generate(executable: Executable, sequences: list[_Sequence]) -> None:
    """Prefill in two packed steps of uneven chunks, then decode together."""
    first = [len(s.tokens) * 3 // 7 for s in sequences]
    executable.run(_inputs(sequences, first, []))
    rest = [len(s.tokens) - s.computed for s in sequences]
    for _ in range(NEW_TOKENS):
        ends = torch.tensor(rest).cumsum(0) - 1
        rows = executable.run(_inputs(sequences, rest, ends.tolist()))
        for sequence, logits in zip(sequences, rows, strict=True):
            sequence.logits.append(logits)
            sequence.tokens.append(int(logits.argmax()))
        rest = [1] * len(sequences)


def _inputs(sequences: list[_Sequence], counts: list[int], wanted: list[int]) -> StepInputs:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, lengths = [0], []
    for sequence, count in zip(sequences, counts, strict=True):
        span = range(sequence.computed, sequence.computed + count)
        ids += [sequence.tokens[p] for p in span]
        positions += span
        slots += [sequence.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in span]
        starts.append(len(ids))
        lengths.append(span.stop)
        sequence.computed = span.stop
    width = max(len(s.blocks) for s in sequences)
    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    return StepInputs(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        logits_index=torch.tensor(wanted, dtype=torch.int64),
        attention=AttentionMetadata(
            query_start=int32(starts),
            seq_lens=int32(lengths),
            block_tables=(int32([s.blocks + [0] * (width - len(s.blocks)) for s in sequences]),),
            slot_mappings=(torch.tensor(slots),),
        ),
        state_slots=int32([s.slot for s in sequences]),
    )


def _reference(model: Any, sequence: _Sequence, encodes: bool) -> torch.Tensor:
    """Compute one sequence on its own with transformers, without any cache."""
    ids = torch.tensor([sequence.tokens])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if encodes:
            rows: torch.Tensor = model(ids)[0][0]
            return rows
        logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    first = len(sequence.tokens) - NEW_TOKENS
    return logits[first - 1 : -1]
