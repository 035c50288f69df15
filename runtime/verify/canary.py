"""Level "canary": before an engine is ready, its compiled program answers a known prompt.

A bundle holds no weights, so what the answer must be depends on the weights that are loaded. The
first start with some weights computes it with eager tiles and the reference attention, and keeps
it in the bundle (`canary/WEIGHTS.json`); every start runs the compiled program and compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from girih.graph.bundle.bundle import Bundle
from girih.graph.bundle.files import tile_graph
from girih.graph.execute.executable import Executable
from girih.graph.execute.step_inputs import StepInputs
from girih.graph.ir.tile_file import read_tile
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.tiles.inductor import TileFn, eager_tile
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import BundleError

PROMPT_TOKENS = 12
# Natural logarithm: how far a log-probability may lie off, by what rounding does in a deep model.
INT8_TOLERANCE = 0.05
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Canary:
    """The answer of a program.

    Attributes:
        prompt: token ids; the last one is fed as a decode step, the others as a prefill.
        next_ids: most likely token after each of them.
        logprobs: its log-probability.
        margins: by how much it leads the second.
    """

    prompt: tuple[int, ...]
    next_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


def verify_canary(
    executable: Executable, bundle: Bundle, weights: dict[str, torch.Tensor], vocab_size: int
) -> VerifyResult:
    """Compare a bound program's answer with what the bundle knows of these weights.

    Args:
        executable: as it will serve; its KV blocks are written, so none may be in use.
        bundle: what it was bound from.
        weights: loaded tensors by plan name.
        vocab_size: bound of the token ids.

    Returns:
        The difference of log-probabilities.

    Raises:
        BundleError: the answer is another one.
    """
    started = time.perf_counter()
    path = bundle.path / "canary" / f"{_fingerprint(weights)}{_cache_name(executable)}.json"
    expected = _read(path)
    how = "as recorded"
    if expected is None:
        expected = _expected(executable, bundle, weights, _prompt(vocab_size))
        how = "as eager code, " + ("recorded" if _write(path, expected) else "not recorded")
    found, bound = _answer(executable, expected.prompt), _tolerance(executable)
    worst = max(abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True))
    result = VerifyResult(
        "canary",
        f"log-probabilities of {len(expected.prompt)} tokens {how}",
        worst,
        bound,
        time.perf_counter() - started,
        _first_difference(found, expected, bound),
    )
    return result.require(
        BundleError,
        f"The compiled code of bundle {bundle.path} computes something else than it did; remove "
        "the bundle (`girih cache prune`) or start with opt=O0",
    )


def _prompt(vocab_size: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary."""
    return tuple((7 + 7919 * i) % vocab_size for i in range(PROMPT_TOKENS))


def _expected(
    executable: Executable,
    bundle: Bundle,
    weights: dict[str, torch.Tensor],
    prompt: tuple[int, ...],
) -> Canary:
    """The same program on eager tiles and reference attention, with a few KV blocks of its own."""
    tiles = {
        key: eager_tile(read_tile(tile_graph(bundle.path, key), shapes=False))
        for key in bundle.layout.tile_counts
    }
    eager = executable_for_canary(executable, bundle, weights, tiles, "reference")
    return _answer(eager, prompt)


def executable_for_canary(
    like: Executable,
    bundle: Bundle,
    weights: dict[str, torch.Tensor],
    tiles: dict[str, TileFn],
    attention: str | None,
) -> Executable:
    """The program of `bundle` bound to `tiles`, with the few KV blocks that a canary needs."""
    return Executable(
        bundle.layout,
        tiles,
        weights,
        _blocks(like.block_size) + 1,
        like.block_size,
        like.dtype,
        attention,
        like.num_state_slots,
        kv_dtype=like.kv_dtype,
    )


def _answer(executable: Executable, prompt: tuple[int, ...]) -> Canary:
    """Run all tokens but the last as one prefill, then the last as a decode step."""
    split = len(prompt) - 1
    with torch.inference_mode():
        parts = [_step(executable, prompt, 0, split), _step(executable, prompt, split, split + 1)]
        rows = torch.cat(parts).float()
    if rows.shape[1] == 1:  # a score: held against 0
        rows = torch.cat((rows, torch.zeros_like(rows)), -1)
    logprobs = rows.log_softmax(-1)
    best = logprobs.topk(2, dim=-1)
    return Canary(
        prompt,
        tuple(best.indices[:, 0].tolist()),
        tuple(best.values[:, 0].tolist()),
        tuple((best.values[:, 0] - best.values[:, 1]).tolist()),
    )


def _step(executable: Executable, prompt: tuple[int, ...], start: int, end: int) -> torch.Tensor:
    size, num_groups = executable.block_size, len(executable.groups.groups)
    positions = torch.arange(start, end)
    blocks = torch.arange(1, num_groups * _blocks(size) + 1, dtype=torch.int32)  # 0 is null
    tables = blocks.view(num_groups, 1, _blocks(size))
    slots = tables[:, 0, positions // size].long() * size + positions % size
    step = StepInputs(
        ids=torch.tensor(prompt[start:end]),
        positions=positions,
        logits_index=torch.arange(end - start),
        attention=AttentionMetadata(
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=tables.unbind(),
            slot_mappings=slots.unbind(),
        ),
        state_slots=torch.zeros(1, dtype=torch.int32) if executable.num_state_slots else None,
        token_types=torch.zeros_like(positions),
    )
    return executable.run(step)


def output_width(executable: Executable) -> int:
    """Values per row of what a program gives, found by running one token."""
    with torch.inference_mode():
        return int(_step(executable, (0,), 0, 1).shape[1])


def _blocks(block_size: int) -> int:
    return -(-PROMPT_TOKENS // block_size)


def _tolerance(executable: Executable) -> float:
    """A key at the edge between two int8 steps falls to either side."""
    bound = TOLERANCE[executable.dtype]
    return bound if executable.kv_dtype != torch.int8 else max(bound, INT8_TOLERANCE)


def _cache_name(executable: Executable) -> str:
    """Return the suffix of the canary's name for a KV cache whose answers differ, or ""."""
    return "-int8" if executable.kv_dtype == torch.int8 else ""


def _first_difference(found: Canary, expected: Canary, bound: float) -> str:
    """Describe the first difference beyond rounding, or ""."""
    for i, token in enumerate(expected.prompt):
        off = abs(found.logprobs[i] - expected.logprobs[i])
        other = found.next_ids[i] != expected.next_ids[i] and expected.margins[i] > 2 * bound
        if other or not off <= bound:
            return (
                f"after token {i} ({token}) the next is {found.next_ids[i]} with log-probability "
                f"{found.logprobs[i]:.4f}, expected {expected.next_ids[i]} with "
                f"{expected.logprobs[i]:.4f} ± {bound}"
            )
    return ""


def _fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """Tells sets of weights apart by a sample of each tensor: reading all would take seconds."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].contiguous()
        digest.update(f"{name} {tuple(weights[name].shape)} {sample.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:20]


def _read(path: Path) -> Canary | None:
    """The recorded canary; None when there is none that can be read."""
    try:
        fields = json.loads(path.read_text())
        return Canary(**{name: tuple(values) for name, values in fields.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(path: Path, canary: Canary) -> bool:
    """Record a canary; False where the bundle cannot be written, which is no fault."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(canary), file)
        os.replace(name, path)
        return True
    return False
