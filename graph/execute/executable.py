"""`bind`: a program with its weights and KV cache, ready to run steps.

Owns the device memory: weights, KV caches, the attention output buffer. `run` is the hot path; it
walks the program's steps once, with everything that can be decided beforehand decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from girih.graph.execute.step_inputs import StepInputs
from girih.graph.ir.program import (
    AttentionStep,
    EagerStep,
    ProgramLayout,
    StateSpec,
    StateStep,
    Step,
    TileStep,
)
from girih.graph.tiles.inductor import TileFn
from girih.graph.tiles.settings import MAX_STEP_TOKENS
from girih.kernels.attention.backends import (
    AttentionSpec,
    choose_backend,
    kv_cache_shapes,
)
from girih.kernels.base.errors import CapacityError, EngineError
from girih.kernels.kv.groups import KVCachePlan, KVCacheSpec, one_group
from girih.kernels.kv.layout import SCALE_BYTES
from girih.kernels.ops.eager import eager_module
from girih.kernels.ops.state import STATE_OPS, StateOp


def kv_cache_specs(layout: ProgramLayout, dtype: torch.dtype) -> list[KVCacheSpec]:
    """Return the spec of each KV slot of a program in a cache of `dtype`, in slot order."""
    return [
        KVCacheSpec(
            spec.num_kv_heads,
            spec.head_dim,
            spec.head_dim_v,
            dtype.itemsize,
            SCALE_BYTES if dtype == torch.int8 else 0,
            window=spec.window if spec.causal else 0,
            chunk=spec.chunk if spec.causal else 0,
        )
        for spec in layout.attention_specs
    ]


def state_bytes_per_request(layout: ProgramLayout) -> int:
    """Bytes the recurrent layers keep for one request."""
    return sum(spec.num_bytes for spec in layout.state_specs)


class Executable:
    """A bound program.

    Args:
        layout: steps and wiring.
        tiles: callable per tile key.
        weights: tensor per weight name, in the planned form.
        num_blocks: KV blocks, the null block included.
        block_size: token slots per block.
        dtype: of activations.
        attention: name of the attention backend; None chooses the best that can run each layer.
        num_state_slots: rows of the states of recurrent layers; as many as requests in a step.
        groups: the KV groups; None keeps all layers in one.
        kv_dtype: of the KV cache; None is `dtype`.

    Attributes:
        before_step: called when a step begins; compiled code is taken in there while it serves.
        when_changed: called when tiles, weights, KV cache or backends have become others.
        dead_after: per step of the layout, the values that no later one reads.
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
        num_state_slots: int = 0,
        groups: KVCachePlan | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.kv_dtype = kv_dtype or dtype
        self.groups = groups or one_group(kv_cache_specs(layout, self.kv_dtype), block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._template: list[torch.Tensor | None] = [None] * layout.num_values
        self.before_step: Callable[[], None] | None = None
        self.when_changed: Callable[[], None] = lambda: None
        self.set_weights(weights)
        self._tiles = tiles
        self._eager = {spec.name: eager_module(spec.name) for spec in layout.eager_specs}
        self.choose_attention(attention)
        self.num_state_slots = num_state_slots
        self._allocate_memory()
        self.dead_after = _values_dead_after(layout)
        self._lives_on = _outputs_that_live_on(layout)
        self._out = torch.empty(0, dtype=dtype)
        _keep_freed_memory()

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run one step.

        Returns:
            Logits [S, V] of the rows in `step.logits_index`; [0, 1] when S is 0.

        Raises:
            EngineError: see `begin_step`.
        """
        self.begin_step(step)
        return self.compute(step)

    def begin_step(self, step: StepInputs) -> None:
        """Check a step and get ready to compute it.

        Raises:
            EngineError: T is outside what tiles were compiled for, or the KV groups are not those
                of the program.
        """
        tokens, groups = step.num_tokens, len(step.attention.block_tables)
        if not 1 <= tokens <= MAX_STEP_TOKENS:
            raise EngineError(
                f"a step has {tokens} tokens; compiled code takes 1 to {MAX_STEP_TOKENS}"
            )
        if groups != len(self.groups.groups) and self.groups.groups:
            raise EngineError(
                f"a step has block tables of {groups} KV groups; the program has "
                f"{len(self.groups.groups)}"
            )
        if self.before_step is not None:
            self.before_step()

    def compute(self, step: StepInputs) -> torch.Tensor:
        """Run a step that has begun; see `run`."""
        values = self.start_values(step)
        steps = self.layout.steps
        if step.logits_index.shape[0] == 0:  # a prefill chunk: only its KV is wanted
            steps = steps[:-1]
        for item, dead in zip(steps, self.dead_after, strict=False):
            if isinstance(item, TileStep):
                results = self._tiles[item.tile]([values[i] for i in item.inputs])  # type: ignore[misc]
                for number, result in zip(item.outputs, results, strict=True):
                    values[number] = result
            elif isinstance(item, EagerStep):
                self._run_eager(item, values)
            elif isinstance(item, AttentionStep):
                values[item.output] = self._attend(item, values, step)
            else:
                arguments = [None if n is None else values[n] for n in item.inputs]
                op, states = STATE_OPS[item.spec.op], self.states_of(item)
                values[item.output] = run_state_step(op, arguments, states, step)
            for number in dead:
                values[number] = None
        logits = values[self.layout.result]
        if logits is None:
            return torch.empty((0, 1), dtype=self.dtype)
        return logits

    def start_values(self, step: StepInputs) -> list[torch.Tensor | None]:
        """The values a step starts from, by number: weights and its inputs."""
        values = self._template.copy()
        for name, number in self.layout.inputs.items():
            values[number] = getattr(step, name)
        return values

    def tile(self, key: str) -> TileFn:
        """The code of a tile."""
        return self._tiles[key]

    def memory_of(self, item: AttentionStep) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys and values that an attention step reads and writes, and its KV group."""
        return *self._caches[item.layer], self._group_of[item.layer]

    def states_of(self, item: StateStep) -> list[torch.Tensor]:
        """The states that a recurrent step advances, a row per state slot."""
        return self._states[item.layer]

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Run with `weights` from the next step on; the KV cache keeps what others computed."""
        for name, number in self.layout.weights.items():
            self._template[number] = weights[name]
        self._weight_bytes = sum(t.nbytes for t in weights.values())
        self.when_changed()

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name."""
        return {
            n: t for n, i in self.layout.weights.items() if (t := self._template[i]) is not None
        }

    def release(self, with_tiles: bool) -> None:
        """Give up weights, KV cache and states, and compiled code when told to; see `restore`."""
        self._template = [None] * self.layout.num_values
        self._caches.clear()
        self._states.clear()
        self._out = torch.empty(0, dtype=self.dtype)
        if with_tiles:
            self._tiles = {}
        self.when_changed()
        return_freed_memory()

    def restore(
        self, weights: dict[str, torch.Tensor], tiles: dict[str, TileFn] | None = None
    ) -> None:
        """Take back what `release` gave up; the KV cache is empty.

        Raises:
            CapacityError: there is no memory for the KV cache; everything stays released.
        """
        self._allocate_memory()
        if tiles is not None:
            self._tiles = tiles
        self.set_weights(weights)

    def _allocate_memory(self) -> None:
        self._caches, self._group_of = self._allocate_groups()
        specs = self.layout.state_specs
        self._states = [_new_states(spec, self.num_state_slots) for spec in specs]

    def replace_tile(self, key: str, tile: TileFn) -> None:
        """Run `tile` for all pieces that share the key, from the next step on."""
        self._tiles[key] = tile
        self.when_changed()

    def choose_attention(self, name: str | None = None) -> None:
        """Choose the attention backend of each layer anew; all of them share one cache layout.

        Args:
            name: of a backend, or None for the best that can run the layer.
        """
        self.backends = [
            choose_backend(spec, self.dtype, self.block_size, name, self.kv_dtype)
            for spec in self.layout.attention_specs
        ]
        self.when_changed()

    def _run_eager(self, item: EagerStep, values: list[torch.Tensor | None]) -> None:
        """Call a module as transformers wrote it."""
        run = self._eager[item.spec.name]
        inputs, weights = ([values[i] for i in group] for group in (item.inputs, item.weights))
        results = run(inputs, weights)  # type: ignore[arg-type]
        for number, result in zip(item.outputs, results, strict=True):
            if number is not None:
                values[number] = result

    def _attend(
        self, item: AttentionStep, values: list[torch.Tensor | None], step: StepInputs
    ) -> torch.Tensor:
        run = self.backends[item.layer].backend.run
        keys, vals, group = self.memory_of(item)
        out = self._attention_output(step.num_tokens, item)
        slopes = values[item.slopes] if item.slopes is not None else None
        sinks = values[item.sinks] if item.sinks is not None else None
        q, k, v = values[item.q], values[item.k], values[item.v]
        run(q, k, v, keys, vals, step.attention, group, item.spec, out, sinks, slopes)  # type: ignore[arg-type]
        return out

    def _attention_output(self, tokens: int, item: AttentionStep) -> torch.Tensor:
        """A view of the one output buffer, when the result is read before the next attention."""
        spec = item.spec
        if item.output in self._lives_on:
            shape = (tokens, spec.num_heads, spec.head_dim_v)
            return torch.empty(shape, dtype=self.dtype)
        size = tokens * spec.num_heads * spec.head_dim_v
        if self._out.numel() < size:
            self._out = torch.empty(size, dtype=self.dtype)
        return self._out[:size].view(tokens, spec.num_heads, spec.head_dim_v)

    def _allocate_groups(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
        """Caches of each layer, and its group: layer i of every group lies in the same tensors."""
        specs, groups = self.layout.attention_specs, self.groups.groups
        largest = max((group.layers for group in groups), key=len, default=())
        caches = [self._allocate(specs[layer]) for layer in largest]
        place = {
            layer: (number, i)
            for number, group in enumerate(groups)
            for i, layer in enumerate(group.layers)
        }
        layers = range(len(specs))
        return [caches[place[layer][1]] for layer in layers], [place[n][0] for n in layers]

    def _allocate(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_cache_shapes(
            self.num_blocks,
            self.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            spec.head_dim_v,
            self.kv_dtype,
        )
        try:
            return lazy_zeros(keys, self.kv_dtype), lazy_zeros(values, self.kv_dtype)
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
        cache = self.num_blocks * self.groups.block_bytes
        states = sum(t.nbytes for slot in self._states for t in slot)
        states_line = f"states    {states / 2**20:10.1f} MiB\n" if states else ""
        return (
            f"weights   {self._weight_bytes / 2**20:10.1f} MiB\n"
            f"kv cache  {cache / 2**20:10.1f} MiB  "
            f"({self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.groups.block_bytes / 2**10:.1f} KiB each, {_name(self.kv_dtype)})\n"
            f"{self.groups.as_text()}{states_line}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are taken when first written, and returned when the tensor goes.

    `torch.zeros` writes them all, and malloc keeps what it gets back (see `_keep_freed_memory`).
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


def _values_dead_after(layout: ProgramLayout) -> list[tuple[int, ...]]:
    """Values no later step reads, per step: freed at once, so that their memory is reused warm."""
    last: dict[int, int] = {}
    for position, item in enumerate(layout.steps):
        for number in _reads(item):
            last[number] = position
        for number in _makes(item):
            last.setdefault(number, position)
    keep = {layout.result, *layout.weights.values()}
    dead: list[list[int]] = [[] for _ in layout.steps]
    for number, position in last.items():
        if number not in keep:
            dead[position].append(number)
    return [tuple(d) for d in dead]


def _outputs_that_live_on(layout: ProgramLayout) -> set[int]:
    """Results of attention that are still needed when the next attention runs."""
    last_read = {number: i for i, step in enumerate(layout.steps) for number in _reads(step)}
    attentions = [(i, s) for i, s in enumerate(layout.steps) if isinstance(s, AttentionStep)]
    return {
        step.output
        for (_, step), (following, _) in pairwise(attentions)
        if last_read.get(step.output, -1) >= following
    }


def _reads(item: Step) -> list[int]:
    if isinstance(item, AttentionStep):
        return [n for n in (item.q, item.k, item.v, item.sinks, item.slopes) if n is not None]
    if isinstance(item, EagerStep):
        return [*item.inputs, *item.weights]
    return [n for n in item.inputs if n is not None]


def _makes(item: Step) -> list[int]:
    if isinstance(item, (TileStep, EagerStep)):
        return [n for n in item.outputs if n is not None]
    return [item.output]


def run_state_step(
    op: StateOp,
    arguments: Sequence[torch.Tensor | None],
    states: Sequence[torch.Tensor],
    step: StepInputs,
) -> torch.Tensor:
    """Run a recurrent layer request by request: advance each one's state by its tokens.

    Args:
        op: the recurrent op.
        arguments: its arguments over the T packed tokens.
        states: its states, a row per state slot.
        step: boundaries and state slots of the requests.

    Returns:
        The op's result over the T tokens; rows of padding are zero.

    Raises:
        EngineError: the step does not say where the requests' states are.
    """
    if step.state_slots is None:
        raise EngineError(f"a step of a model with {op.name} layers needs state_slots")
    like = arguments[op.arguments.index(op.output_like)]
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    starts, lengths = step.attention.query_start.tolist(), step.attention.seq_lens.tolist()
    for request, slot in enumerate(step.state_slots.tolist()):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        own = [state[slot] for state in states]
        if lengths[request] == end - begin:
            for state in own:
                state.zero_()
        rows = [
            a[begin:end] if a is not None and op.is_per_token(i) else a
            for i, a in enumerate(arguments)
        ]
        out[begin:end] = op.run(rows, own)
    return out


def _new_states(spec: StateSpec, num_slots: int) -> list[torch.Tensor]:
    dtype = getattr(torch, spec.dtype)
    return [lazy_zeros((num_slots, *shape), dtype) for shape in spec.shapes]


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


def return_freed_memory() -> None:
    """Return to the system what malloc keeps."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
