"""Captured steps on the CPU: everything a step needs is bound once per padded shape, then replayed.

    fill the inputs ─▶ tile ─▶ attention ─▶ tile ─▶ … ─▶ logits      the same addresses every time

The first step of a shape is recorded while it runs. A later one is copied into the same inputs,
padded, and the recorded calls run in order; nothing is allocated or looked up in between. As with a
graph of a GPU, results lie in buffers that the next step overwrites, and what is bound into the
calls (weights, KV cache, code) must not be exchanged under them: `StaticSteps.forget` comes first.

A row of padding has token 0 at position 0 and slot -1, and belongs to no request: its KV is not
written and no attention reads it. A request of padding has no token, and the null block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from girih.graph.execute.batch_descriptor import BatchDescriptor
from girih.graph.execute.executable import Executable, lazy_zeros, run_state_step
from girih.graph.execute.step_inputs import StepInputs
from girih.graph.ir.program import AttentionStep, StateStep, TileStep
from girih.graph.tiles.inductor import TileFn
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import EngineError
from girih.kernels.ops.state import STATE_OPS

# A recorded call, given the step: of a whole shape always the same inputs, filled anew.
Call = Callable[[StepInputs], object]


class StaticMemory:
    """Buffers for the values of recorded steps. One step runs at a time, so all shapes share them.

    Args:
        max_tokens: T of the largest shape.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._slabs: dict[int, list[torch.Tensor]] = defaultdict(list)  # bytes per token -> slabs
        self._free: dict[int, list[torch.Tensor]] = {}
        self._taken: dict[int, tuple[int, torch.Tensor]] = {}  # address -> its bytes per token

    @property
    def num_bytes(self) -> int:
        """Address space; pages are taken when a value is first written there."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def begin(self) -> None:
        """A shape is recorded from here on: every buffer is free for it."""
        self._free = {size: list(slabs) for size, slabs in self._slabs.items()}
        self._taken.clear()

    def take(self, shape: Sequence[int], dtype: torch.dtype, tokens: int) -> torch.Tensor:
        """A buffer for a value of a step of `tokens` tokens."""
        size = math.prod(shape) * dtype.itemsize
        per_token = -(-size // tokens)
        free = self._free.setdefault(per_token, [])
        if not free:
            slab = lazy_zeros((max(1, per_token) * self._max_tokens,), torch.uint8)
            self._slabs[per_token].append(slab)
            free.append(slab)
        slab = free.pop()
        self._taken[slab.data_ptr()] = (per_token, slab)
        return slab[:size].view(dtype).view(tuple(shape))

    def give_back(self, value: torch.Tensor) -> None:
        """The shape that is recorded needs a value no more; others than taken ones are ignored."""
        per_token, slab = self._taken.pop(value.data_ptr(), (0, None))
        if slab is not None:
            self._free[per_token].append(slab)


class StaticSteps:
    """Makes captured steps of an executable; owns the buffers that they share.

    Args:
        executable: whose steps.
        max_tokens: T of the largest shape.
        max_blocks: blocks in the table of the longest request.
    """

    def __init__(self, executable: Executable, max_tokens: int, max_blocks: int) -> None:
        self._executable = executable
        self._sizes = (max_tokens, max_blocks)
        self.forget()

    def why_not(self, is_whole: bool) -> str | None:
        """Why no step of this kind can be captured, or None when it can."""
        layout = self._executable.layout
        selection = layout.inputs.get("logits_index")
        pieces = [s for s in layout.steps if isinstance(s, TileStep)]
        early = any(selection in s.inputs for s in pieces[:-1])
        if early or layout.steps[-1] is not pieces[-1]:
            return "rows are selected before the last piece"
        if layout.eager_specs:
            return "modules that stay eager see all rows, padding too"
        if is_whole and layout.state_specs:
            return "recurrent layers go through the requests one by one"
        return None

    def capture(self, shape: BatchDescriptor) -> StaticStep:
        """A step of this shape; it is recorded when it first runs."""
        return StaticStep(self._executable, self._memory, _part(self._inputs, shape), shape)

    def forget(self) -> None:
        """Give up the buffers; steps that were captured may not run any more."""
        max_tokens, max_blocks = self._sizes
        self._memory = StaticMemory(max_tokens)
        self._inputs = _buffers(len(self._executable.groups.groups), max_tokens, max_blocks)

    @property
    def num_bytes(self) -> int:
        """Address space of the buffers."""
        return self._memory.num_bytes


class StaticStep:
    """The captured step of one shape.

    Args:
        executable: whose step.
        memory: for its values.
        inputs: what it reads, of its shape.
        shape: its shape.
    """

    def __init__(
        self,
        executable: Executable,
        memory: StaticMemory,
        inputs: StepInputs,
        shape: BatchDescriptor,
    ) -> None:
        self._executable = executable
        self._memory = memory
        self._inputs = inputs
        self._shape = shape
        self._calls: list[Call] = []
        self._head: tuple[TileFn, list[torch.Tensor], int] | None = None
        self._logits: torch.Tensor | None = None

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run a step that has begun (`Executable.begin_step`).

        Returns:
            Logits [S, V], valid until the next step; [0, 1] when S is 0.

        Raises:
            EngineError: the step does not fit the shape.
        """
        tokens, requests = step.num_tokens, step.num_requests
        if tokens > self._shape.tokens or requests > (self._shape.requests or requests):
            raise EngineError(f"{tokens} tokens of {requests} requests do not fit {self._shape}")
        padded = self._fill(step)
        if not self._calls:
            self._record(padded)
        else:
            for call in self._calls:
                call(padded)
        return self._result(step)

    def _fill(self, step: StepInputs) -> StepInputs:
        """Copy a step to the inputs, padded; returns what the recorded calls are given."""
        own, given = self._inputs.attention, step.attention
        _pad(self._inputs.ids, step.ids, 0)
        _pad(self._inputs.positions, step.positions, 0)
        for buffer, slots in zip(own.slot_mappings, given.slot_mappings, strict=True):
            _pad(buffer, slots, -1)
        if step.token_types is not None and self._inputs.token_types is not None:
            _pad(self._inputs.token_types, step.token_types, 0)
        if not self._shape.is_whole:
            return replace(step, attention=replace(given, slot_mappings=own.slot_mappings))
        _pad(self._inputs.logits_index, step.logits_index, 0)
        _pad(own.query_start, given.query_start, step.num_tokens)
        _pad(own.seq_lens, given.seq_lens, 0)
        for buffer, table in zip(own.block_tables, given.block_tables, strict=True):
            buffer[: table.shape[0], : table.shape[1]] = table
            buffer[table.shape[0] :] = 0
        return self._inputs

    def _result(self, step: StepInputs) -> torch.Tensor:
        count = step.logits_index.shape[0]
        if count == 0:
            return torch.empty((0, 1), dtype=self._executable.dtype)
        if self._logits is not None:
            return self._logits[:count]
        assert self._head is not None
        run, inputs, place = self._head
        inputs = inputs.copy()
        inputs[place] = step.logits_index
        return run(inputs)[0]

    # ---- recording ----

    def _record(self, step: StepInputs) -> None:
        """Run the step, and keep every call with the buffers it reads and writes."""
        executable, layout = self._executable, self._executable.layout
        self._memory.begin()
        values = executable.start_values(self._inputs)
        calls: list[Call] = []
        steps = layout.steps if self._shape.is_whole else layout.steps[:-1]
        for item, dead in zip(steps, executable.dead_after, strict=False):
            if isinstance(item, TileStep):
                calls.append(self._tile_call(item, values))
            elif isinstance(item, StateStep):
                calls.append(self._state_call(item, values, step))
            else:
                assert isinstance(item, AttentionStep), "see `StaticSteps.why_not`"
                calls.append(self._attention_call(item, values))
                calls[-1](step)
            for number in dead:
                value, values[number] = values[number], None
                if value is not None:
                    self._memory.give_back(value)
        if self._shape.is_whole:
            self._logits = values[layout.result]
        else:
            self._head = self._head_call(layout.steps[-1], values)
        self._calls = calls

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        return self._memory.take(like.shape, like.dtype, self._shape.tokens)

    def _tile_call(self, item: TileStep, values: list[torch.Tensor | None]) -> Call:
        inputs = [values[number] for number in item.inputs]
        run = self._executable.tile(item.tile)
        results = run(inputs.copy())  # type: ignore[arg-type]
        outputs = [self._take(result) for result in results]
        for number, output, result in zip(item.outputs, outputs, results, strict=True):
            values[number] = output.copy_(result)
        # The list is copied because compiled code empties the one it gets.
        return lambda _: torch._foreach_copy_(outputs, run(inputs.copy()))  # type: ignore[arg-type]

    def _attention_call(self, item: AttentionStep, values: list[torch.Tensor | None]) -> Call:
        executable, spec = self._executable, item.spec
        keys, vals, group = executable.memory_of(item)
        shape = (self._shape.tokens, spec.num_heads, spec.head_dim_v)
        out = self._memory.take(shape, executable.dtype, self._shape.tokens)
        values[item.output] = out
        q, k, v = values[item.q], values[item.k], values[item.v]
        sinks = values[item.sinks] if item.sinks is not None else None
        slopes = values[item.slopes] if item.slopes is not None else None
        backend = executable.backends[item.layer].backend
        assert q is not None and k is not None and v is not None

        def run(step: StepInputs) -> None:
            backend.run(q, k, v, keys, vals, step.attention, group, spec, out, sinks, slopes)

        return run

    def _state_call(
        self, item: StateStep, values: list[torch.Tensor | None], step: StepInputs
    ) -> Call:
        arguments = [None if n is None else values[n] for n in item.inputs]
        states, op = self._executable.states_of(item), STATE_OPS[item.spec.op]
        result = run_state_step(op, arguments, states, step)
        output = values[item.output] = self._take(result)
        output.copy_(result)
        return lambda step: output.copy_(run_state_step(op, arguments, states, step))

    def _head_call(
        self, item: object, values: list[torch.Tensor | None]
    ) -> tuple[TileFn, list[torch.Tensor], int]:
        """The last piece: it reads how many rows are wanted, which no shape fixes."""
        assert isinstance(item, TileStep)
        place = item.inputs.index(self._executable.layout.inputs["logits_index"])
        inputs = [values[number] for number in item.inputs]
        return self._executable.tile(item.tile), inputs, place  # type: ignore[return-value]


def _buffers(num_groups: int, max_tokens: int, max_blocks: int) -> StepInputs:
    """The inputs that recorded steps read, large enough for every shape."""
    int32 = partial(torch.zeros, dtype=torch.int32)
    int64 = partial(torch.zeros, dtype=torch.int64)
    return StepInputs(
        ids=int64(max_tokens),
        positions=int64(max_tokens),
        logits_index=int64(max_tokens),
        attention=AttentionMetadata(
            query_start=int32(max_tokens + 1),
            seq_lens=int32(max_tokens),
            block_tables=int32(num_groups, max_tokens, max_blocks).unbind(),
            slot_mappings=int64(num_groups, max_tokens).unbind(),
        ),
        token_types=int64(max_tokens),
    )


def _part(whole: StepInputs, shape: BatchDescriptor) -> StepInputs:
    """The part of the inputs that steps of a shape read."""
    tokens, requests, attention = shape.tokens, shape.requests or 0, whole.attention
    assert whole.token_types is not None
    return StepInputs(
        ids=whole.ids[:tokens],
        positions=whole.positions[:tokens],
        logits_index=whole.logits_index[:requests],
        attention=AttentionMetadata(
            query_start=attention.query_start[: requests + 1],
            seq_lens=attention.seq_lens[:requests],
            block_tables=tuple(table[:requests] for table in attention.block_tables),
            slot_mappings=tuple(slots[:tokens] for slots in attention.slot_mappings),
        ),
        token_types=whole.token_types[:tokens],
    )


def _pad(buffer: torch.Tensor, value: torch.Tensor, padding: int) -> None:
    """Copy `value` to the front of `buffer` and fill the rest."""
    count = value.shape[0]
    buffer[:count] = value
    if count < buffer.shape[0]:
        buffer[count:] = padding
