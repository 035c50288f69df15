"""Whether a family compiles to what transformers computes: packed prefill, chunks, decode."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support_architectures import Family, random_model
from support_models import opt_o2

from girih.graph.checkpoint import open_checkpoint
from girih.graph.executable import Executable, StepInputs
from girih.graph.inductor import TileFn, compile_tile, eager_tile, load_tile
from girih.graph.partition import Program
from girih.graph.spec import load_spec
from girih.graph.trace import trace
from girih.graph.weights import load_weights
from girih.kernels.errors import GirihError
from girih.kernels.library import build_library, load_library
from girih.kernels.target import Target, detect_isa
from girih.passes.build import lower_and_partition

BLOCK = 16
LENGTHS = (21, 9, 30)
NEW_TOKENS = 16
TOLERANCE = 2e-4


@dataclass
class Agreement:
    """One row of the table."""

    name: str
    result: str = ""
    pieces: int = 0
    tiles: int = 0
    rewrites: dict[str, int] = field(default_factory=dict)
    max_error: float = float("nan")
    spread: float = float("nan")
    same_tokens: bool = False
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.result == "agrees"


MakeTiles = Callable[[Program, Target], dict[str, TileFn]]


def eager_tiles(program: Program, target: Target) -> dict[str, TileFn]:
    """Every tile operation by operation."""
    return {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}


def compiled_tiles(directory: Path) -> MakeTiles:
    """Every tile compiled for this machine, in `directory`."""

    def make(program: Program, target: Target) -> dict[str, TileFn]:
        directory.mkdir(parents=True)
        load_library(build_library(target.isa, directory / "kernels.so"))
        for key, tile in program.tiles.items():
            compile_tile(tile.graph, directory / f"{key}.pt2", target)
        return {key: load_tile(directory / f"{key}.pt2") for key in program.tiles}

    return make


def check_family(family: Family, directory: Path, make_tiles: MakeTiles = eager_tiles) -> Agreement:
    """Build a tiny model, run it through girih at O2, compare with transformers' eager float32."""
    started = time.perf_counter()
    row = Agreement(family.name)
    try:
        model = random_model(family)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(directory)
        program = _program(directory, row)
        executable = _bind(program, directory, make_tiles)
        _compare(family, model, executable, row)
    except GirihError as refusal:
        row.result = f"refused: {refusal}"
    row.seconds = time.perf_counter() - started
    return row


def _program(directory: Path, row: Agreement) -> Program:
    target = Target("cpu", detect_isa(), 2, "g++")
    traced = trace(load_spec(str(directory)))
    lowered, program = lower_and_partition(traced, opt_o2(), target)
    row.pieces, row.tiles = program.num_pieces, len(program.tiles)
    row.rewrites = {r.name: r.rewrites for r in lowered.records}
    return program


def _bind(program: Program, directory: Path, make_tiles: MakeTiles) -> Executable:
    target = Target("cpu", detect_isa(), 2, "g++")
    with open_checkpoint(load_spec(str(directory)).files) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, target.isa)
    tiles = make_tiles(program, target)
    return Executable(
        program.layout, tiles, weights, 24, BLOCK, torch.float32, num_state_slots=len(LENGTHS) + 1
    )


class _Sequence:
    def __init__(self, number: int, tokens: list[int]) -> None:
        blocks = -(-(len(tokens) + NEW_TOKENS) // BLOCK)
        self.tokens, self.computed = tokens, 0
        self.blocks = [1 + number + len(LENGTHS) * i for i in range(blocks)]
        self.slot = len(LENGTHS) - number
        self.logits: list[torch.Tensor] = []


def _compare(
    family: Family, model: torch.nn.Module, executable: Executable, row: Agreement
) -> None:
    generator = torch.Generator().manual_seed(7)
    vocab = 120
    sequences = [
        _Sequence(n, torch.randint(3, vocab, (length,), generator=generator).tolist())
        for n, length in enumerate(LENGTHS)
    ]
    if family.kind == "encoder":
        _encode(executable, sequences)
    else:
        _generate(executable, sequences)
    expected = [_reference(family, model, s) for s in sequences]
    found = [torch.stack(s.logits) for s in sequences]
    row.max_error = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    row.spread = max(float(e.std(0).mean()) for e in expected)
    row.same_tokens = family.kind == "encoder" or all(
        _same_choice(e, f) for e, f in zip(expected, found, strict=True)
    )
    scale = max(1.0, max(float(e.abs().max()) for e in expected))
    if not row.max_error <= TOLERANCE * scale:
        row.result = f"wrong: logits differ by {row.max_error:.1e} of {scale:.1f}"
    elif not row.same_tokens:
        row.result = "wrong: other tokens"
    elif row.spread < 1e-2:
        row.result = "unproven: logits hardly depend on the input"
    else:
        row.result = "agrees"


def _same_choice(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether the tokens chosen are transformers' choices too, near-ties aside."""
    chosen = found.argmax(-1, keepdim=True)
    gap = expected.max(-1).values - expected.gather(-1, chosen)[:, 0]
    return bool((gap <= TOLERANCE * max(1.0, float(expected.abs().max()))).all())


def _encode(executable: Executable, sequences: list[_Sequence]) -> None:
    lengths = [len(s.tokens) for s in sequences]
    rows = executable.run(_inputs(sequences, lengths, list(range(sum(lengths)))))
    for sequence, part in zip(sequences, rows.split(lengths), strict=True):
        sequence.logits = list(part)


def _generate(executable: Executable, sequences: list[_Sequence]) -> None:
    """Prefill in two packed steps of uneven chunks, then decode together."""
    executable.run(_inputs(sequences, [9, 4, 13], []))
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
        query_start=int32(starts),
        seq_lens=int32(lengths),
        block_table=int32([s.blocks + [0] * (width - len(s.blocks)) for s in sequences]),
        slot_mapping=torch.tensor(slots),
        state_slots=int32([s.slot for s in sequences]),
    )


def _reference(family: Family, model: Any, sequence: _Sequence) -> torch.Tensor:
    """What transformers computes for one sequence on its own, without any cache."""
    ids = torch.tensor([sequence.tokens])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family.kind == "encoder":
            rows: torch.Tensor = model(ids)[0][0]
            return rows
        logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    first = len(sequence.tokens) - NEW_TOKENS
    return logits[first - 1 : -1]
