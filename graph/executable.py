"""`bind`: a program with its weights and KV cache, ready to run steps.

Owns the device memory: weights, KV caches, the attention output buffer. `run` is the hot path; it
walks the program's steps once, with everything that can be decided beforehand decided here.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from girih.graph.inductor import TileFn
from girih.graph.program import AttentionStep, ProgramLayout, TileStep
from girih.graph.trace import MAX_STEP_TOKENS
from girih.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    AttentionSpec,
    choose_backend,
    kv_cache_shapes,
)
from girih.kernels.errors import CapacityError, EngineError


@dataclass(frozen=True)
class StepInputs:
    """The tensors of one step (host memory on the CPU).

    Attributes:
        ids: int64 [T], packed token ids.
        positions: int64 [T], position of each token in its sequence.
        logits_index: int64 [S], the rows whose logits are wanted.
        query_start: int32 [R+1]; see `PagedBatch`.
        seq_lens: int32 [R].
        block_table: int32 [R, max_blocks].
        slot_mapping: int64 [T].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


def kv_bytes_per_block(layout: ProgramLayout, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all KV slots of a program."""
    total = 0
    for spec in layout.attention_specs:
        for shape in _cache_shapes(spec, 1, block_size, dtype):
            total += torch.Size(shape).numel() * dtype.itemsize
    return total


class Executable:
    """A bound program.

    Args:
        layout: steps and wiring.
        tiles: callable per tile key.
        weights: tensor per weight name, in the planned form.
        num_blocks: KV blocks, the null block included.
        block_size: token slots per block.
        dtype: of activations and of the KV cache.
        attention: name of the attention backend; None chooses the best that can run each layer.
    """

    def __init__(  # noqa: PLR0913 (the parts a program is bound from)
        self,
        layout: ProgramLayout,
        tiles: dict[str, TileFn],
        weights: dict[str, torch.Tensor],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        attention: str | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._template: list[torch.Tensor | None] = [None] * layout.num_values
        for name, number in layout.weights.items():
            self._template[number] = weights[name]
        self._weight_bytes = sum(t.nbytes for t in weights.values())
        self._tiles = tiles
        self.backends = [
            choose_backend(spec, dtype, block_size, attention) for spec in layout.attention_specs
        ]
        self._caches = [self._allocate(spec) for spec in layout.attention_specs]
        self._dead = _values_dead_after(layout)
        self._out = torch.empty(0, dtype=dtype)
        _keep_freed_memory()

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run one step.

        Returns:
            Logits [S, V] of the rows in `step.logits_index`; [0, 1] when S is 0.

        Raises:
            EngineError: T is outside what tiles were compiled for.
        """
        tokens = step.ids.shape[0]
        if not 1 <= tokens <= MAX_STEP_TOKENS:
            raise EngineError(
                f"a step has {tokens} tokens; compiled code takes 1 to {MAX_STEP_TOKENS}"
            )
        plans: dict[AttentionBackend, AttentionPlan] = {}
        values = self._template.copy()
        for name, number in self.layout.inputs.items():
            values[number] = getattr(step, name)
        steps = self.layout.steps
        if step.logits_index.shape[0] == 0:  # a prefill chunk: only its KV is wanted
            steps = steps[:-1]
        for item, dead in zip(steps, self._dead, strict=False):
            if isinstance(item, TileStep):
                results = self._tiles[item.tile]([values[i] for i in item.inputs])  # type: ignore[misc]
                for number, result in zip(item.outputs, results, strict=True):
                    values[number] = result
            else:
                values[item.output] = self._attend(item, values, step, plans)
            for number in dead:
                values[number] = None
        logits = values[self.layout.result]
        if logits is None:
            return torch.empty((0, 1), dtype=self.dtype)
        return logits

    def _attend(
        self,
        item: AttentionStep,
        values: list[torch.Tensor | None],
        step: StepInputs,
        plans: dict[AttentionBackend, AttentionPlan],
    ) -> torch.Tensor:
        backend = self.backends[item.layer].backend
        plan = plans.get(backend)
        if plan is None:
            plan = plans[backend] = backend.plan(step)
        spec = item.spec
        keys, vals = self._caches[item.layer]
        out = self._attention_output(step.ids.shape[0], spec)
        sinks = values[item.sinks] if item.sinks is not None else None
        q, k, v = values[item.q], values[item.k], values[item.v]
        backend.run(q, k, v, keys, vals, plan, spec, out, sinks)  # type: ignore[arg-type]
        return out

    def _attention_output(self, tokens: int, spec: AttentionSpec) -> torch.Tensor:
        """A view of the one output buffer: the next tile has read it before the next layer."""
        size = tokens * spec.num_heads * spec.head_dim_v
        if self._out.numel() < size:
            self._out = torch.empty(size, dtype=self.dtype)
        return self._out[:size].view(tokens, spec.num_heads, spec.head_dim_v)

    def _allocate(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = _cache_shapes(spec, self.num_blocks, self.block_size, self.dtype)
        try:
            return _lazy_zeros(keys, self.dtype), _lazy_zeros(values, self.dtype)
        except MemoryError as error:
            raise CapacityError(
                f"no memory for {self.num_blocks} KV blocks of {self.block_size} tokens; lower "
                "cache.num_blocks, cache.kv_cache_bytes or cache.memory_fraction"
            ) from error

    def attention_report(self) -> str:
        """Which backend runs how many layers, and why others were not taken."""
        lines = []
        for choice, count in Counter(self.backends).items():
            why = "; ".join(f"not {name}: {reason}" for name, reason in choice.reasons)
            lines.append(
                f"attention {choice.backend.name} × {count}" + (f" ({why})" if why else "")
            )
        return "\n".join(lines)

    def memory_table(self) -> str:
        """Bytes owned, for people."""
        cache = sum(k.nbytes + v.nbytes for k, v in self._caches)
        tokens = (self.num_blocks - 1) * self.block_size
        return (
            f"weights   {self._weight_bytes / 2**20:10.1f} MiB\n"
            f"kv cache  {cache / 2**20:10.1f} MiB  "
            f"({self.num_blocks} blocks of {self.block_size}, {tokens} tokens)\n"
        )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are taken when first written (calloc; `torch.zeros` writes them all)."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def _cache_shapes(
    spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return kv_cache_shapes(
        num_blocks, block_size, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, dtype
    )


def _values_dead_after(layout: ProgramLayout) -> list[tuple[int, ...]]:
    """Values no later step reads, per step: freed at once, so that their memory is reused warm."""
    last: dict[int, int] = {}
    for position, item in enumerate(layout.steps):
        for number in _reads(item):
            last[number] = position
        for number in item.outputs if isinstance(item, TileStep) else (item.output,):
            last.setdefault(number, position)
    keep = {layout.result, *layout.weights.values()}
    dead: list[list[int]] = [[] for _ in layout.steps]
    for number, position in last.items():
        if number not in keep:
            dead[position].append(number)
    return [tuple(d) for d in dead]


def _reads(item: TileStep | AttentionStep) -> list[int]:
    if isinstance(item, TileStep):
        return list(item.inputs)
    return [n for n in (item.q, item.k, item.v, item.sinks) if n is not None]


def _keep_freed_memory() -> None:
    """Let malloc reuse freed activations instead of returning them to the system.

    By default glibc maps large blocks afresh each time and every page of them faults again.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 1 << 30)
    except (OSError, AttributeError):
        return
