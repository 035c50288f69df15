"""Fills a weight plan from a checkpoint: each tensor goes straight to its planned place.

One checkpoint tensor is in memory at a time beside what is kept, so loading peaks at the size of
the weights plus the largest single tensor.
"""

from __future__ import annotations

import torch

import girih.kernels.ops.schemas  # registers pack_linear_  # noqa: F401
from girih.graph.ir.weight_plan import CONSTANT, PACKED, Source, WeightEntry, WeightPlan
from girih.graph.weights.checkpoint import Checkpoint
from girih.graph.weights.conversions import read_source
from girih.kernels.base.errors import WeightError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress
from girih.kernels.ops.packing import packed_shape


def load_weights(
    plan: WeightPlan,
    checkpoint: Checkpoint,
    constants: dict[str, torch.Tensor],
    isa: str,
    progress: Progress = no_progress,
) -> dict[str, torch.Tensor]:
    """Load every entry of a plan.

    Args:
        plan: what the program needs.
        checkpoint: where source tensors are read from.
        constants: values of the entries of form "constant".
        isa: instruction set that packed entries are laid out for.
        progress: observer; one event per entry.

    Returns:
        Tensors by entry name, in their planned form.

    Raises:
        WeightError: a source is missing or does not have the planned shape.
    """
    loaded: dict[str, torch.Tensor] = {}
    total = len(plan.entries)
    for done, entry in enumerate(plan.entries.values()):
        progress(ProgressEvent("weights", done, total, entry.name))
        loaded[entry.name] = _load(entry, checkpoint, constants, isa)
    progress(ProgressEvent("weights", total, total))
    return loaded


def _load(
    entry: WeightEntry, checkpoint: Checkpoint, constants: dict[str, torch.Tensor], isa: str
) -> torch.Tensor:
    if entry.form == CONSTANT:
        return constants[entry.name].clone()
    dtype = getattr(torch, entry.dtype)
    shape = entry.shape
    if entry.form == PACKED:
        shape = packed_shape(entry.shape[0], entry.shape[1], dtype, isa)
    target = torch.zeros(shape, dtype=dtype)
    row = 0
    for source in entry.sources:
        rows = read_source(source, checkpoint, entry.dtype)
        _check(entry, source, rows, row)
        count = rows.shape[0] if rows.ndim else 1
        if entry.form == PACKED:
            torch.ops.girih.pack_linear_(target, rows.contiguous(), row)
        elif rows.ndim:
            target[row : row + count].copy_(rows)
        else:
            target.copy_(rows)
        row += count
    if entry.shape and row != entry.shape[0]:
        raise WeightError(
            f"{entry.name} needs {entry.shape[0]} rows; its sources "
            f"{', '.join(map(_source_name, entry.sources))} "
            f"have {row}"
        )
    return target


def _source_name(source: Source) -> str:
    return source if isinstance(source, str) else source.name


def _check(entry: WeightEntry, source: Source, rows: torch.Tensor, row: int) -> None:
    if rows.is_floating_point() != getattr(torch, entry.dtype).is_floating_point:
        kind = str(rows.dtype).removeprefix("torch.")
        raise WeightError(
            f"tensor {_source_name(source)} is stored as {kind}; the configuration asks for "
            f"{entry.dtype}. Quantised weights are read from GGUF only"
        )
    same_kind = rows.ndim == len(entry.shape) and tuple(rows.shape[1:]) == entry.shape[1:]
    if not same_kind or (entry.shape and row + rows.shape[0] > entry.shape[0]):
        expected = ", ".join(map(str, entry.shape))
        raise WeightError(
            f"tensor {_source_name(source)} has shape {list(rows.shape)}; the configuration asks "
            f"for [{expected}]{' rows in all' if len(entry.sources) > 1 else ''}"
        )
