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
from girih.graph.execute.executable import (
    Executable,
    StepInputs,
    StepPlans,
    lazy_zeros,
    run_state_step,
)
from girih.graph.ir.program import AttentionStep, StateStep, TileStep
from girih.graph.tiles.inductor import TileFn
from girih.kernels.attention.backends import AttentionBackend, AttentionPlan
from girih.kernels.base.errors import EngineError
from girih.kernels.ops.state import STATE_OPS

# A recorded call; a step that is not whole hands over the plans and the step it is for.
Call = Callable[[StepPlans, StepInputs], object]


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


class _Inputs:
    """The inputs that recorded steps read, large enough for every shape.

    Args:
        executable: whose steps.
        max_tokens: T of the largest shape.
        max_blocks: width of a block table.
    """

    def __init__(self, executable: Executable, max_tokens: int, max_blocks: int) -> None:
        groups = len(executable.groups.groups)
        lead = () if groups == 1 else (groups,)
        int32 = partial(torch.zeros, dtype=torch.int32)
        int64 = partial(torch.zeros, dtype=torch.int64)
        self._whole = StepInputs(
            ids=int64(max_tokens),
            positions=int64(max_tokens),
            logits_index=int64(max_tokens),
            query_start=int32(max_tokens + 1),
            seq_lens=int32(max_tokens),
            block_table=int32((*lead, max_tokens, max_blocks)),
            slot_mapping=int64((*lead, max_tokens)),
            token_types=int64(max_tokens),
        )

    def of(self, shape: BatchDescriptor) -> StepInputs:
        """The part that steps of a shape read."""
        whole, tokens, requests = self._whole, shape.tokens, shape.requests or 0
        assert whole.token_types is not None
        return StepInputs(
            ids=whole.ids[:tokens],
            positions=whole.positions[:tokens],
            logits_index=whole.logits_index[:requests],
            query_start=whole.query_start[: requests + 1],
            seq_lens=whole.seq_lens[:requests],
            block_table=whole.block_table[..., :requests, :],
            slot_mapping=whole.slot_mapping[..., :tokens],
            token_types=whole.token_types[:tokens],
        )


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
        return StaticStep(self._executable, self._memory, self._inputs.of(shape), shape)

    def forget(self) -> None:
        """Give up the buffers; steps that were captured may not run any more."""
        max_tokens, max_blocks = self._sizes
        self._memory = StaticMemory(max_tokens)
        self._inputs = _Inputs(self._executable, max_tokens, max_blocks)

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
        self._whole_calls: list[Callable[[], object]] = []
        self._head: tuple[TileFn, list[torch.Tensor], int] | None = None
        self._logits: torch.Tensor | None = None

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run a step that has begun (`Executable.begin_step`).

        Returns:
            Logits [S, V], valid until the next step; [0, 1] when S is 0.

        Raises:
            EngineError: the step does not fit the shape.
        """
        tokens, requests = step.ids.shape[0], step.seq_lens.shape[0]
        if tokens > self._shape.tokens or requests > (self._shape.requests or requests):
            raise EngineError(f"{tokens} tokens of {requests} requests do not fit {self._shape}")
        plans = self._fill(step)
        if not self._calls:
            self._record(plans, step)
        elif self._whole_calls:
            for call in self._whole_calls:
                call()
        else:
            for piece in self._calls:
                piece(plans, step)
        return self._result(step)

    def _fill(self, step: StepInputs) -> StepPlans:
        """Copy a step to the inputs, padded; returns what attention is planned from."""
        own, tokens, requests = self._inputs, step.ids.shape[0], step.seq_lens.shape[0]
        _pad(own.ids, step.ids, 0)
        _pad(own.positions, step.positions, 0)
        _pad(own.slot_mapping, step.slot_mapping, -1)
        if step.token_types is not None and own.token_types is not None:
            _pad(own.token_types, step.token_types, 0)
        if not self._shape.is_whole:
            padded = replace(step, slot_mapping=own.slot_mapping)
            return StepPlans(padded, self._executable.groups)
        _pad(own.logits_index, step.logits_index, 0)
        _pad(own.query_start, step.query_start, tokens)
        _pad(own.seq_lens, step.seq_lens, 0)
        columns = step.block_table.shape[-1]
        own.block_table[..., :requests, :columns] = step.block_table
        if requests < own.block_table.shape[-2]:
            own.block_table[..., requests:, :] = 0
        return StepPlans(own, self._executable.groups)

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

    def _record(self, plans: StepPlans, step: StepInputs) -> None:
        """Run the step, and keep every call with the buffers it reads and writes."""
        executable, layout = self._executable, self._executable.layout
        self._memory.begin()
        values = executable.start_values(self._inputs)
        calls: list[Call] = []
        whole_calls: list[Callable[[], object]] = []
        steps = layout.steps if self._shape.is_whole else layout.steps[:-1]
        for item, dead in zip(steps, executable.dead_after, strict=False):
            call: Call
            if isinstance(item, TileStep):
                call = self._tile_call(item, values)
            elif isinstance(item, StateStep):
                call = self._state_call(item, values, step)
            else:
                assert isinstance(item, AttentionStep), "see `StaticSteps.why_not`"
                call = attend = self._attention_call(item, values)
                call(plans, step)
                if self._shape.is_whole:
                    whole_calls.append(attend.planned(plans))
            if isinstance(call, _TileCall):
                whole_calls.append(call.run)
            calls.append(call)
            for number in dead:
                value, values[number] = values[number], None
                if value is not None:
                    self._memory.give_back(value)
        if self._shape.is_whole:
            self._whole_calls, self._logits = whole_calls, values[layout.result]
        else:
            self._head = self._head_call(layout.steps[-1], values)
        self._calls = calls

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        return self._memory.take(like.shape, like.dtype, self._shape.tokens)

    def _tile_call(self, item: TileStep, values: list[torch.Tensor | None]) -> _TileCall:
        inputs = [values[number] for number in item.inputs]
        run = self._executable.tile(item.tile)
        results = run(inputs.copy())  # type: ignore[arg-type]
        outputs = [self._take(result) for result in results]
        for number, output, result in zip(item.outputs, outputs, results, strict=True):
            values[number] = output.copy_(result)
        return _TileCall(run, inputs, outputs)  # type: ignore[arg-type]

    def _attention_call(
        self, item: AttentionStep, values: list[torch.Tensor | None]
    ) -> _AttentionCall:
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

        def run(plan: AttentionPlan) -> None:
            backend.run(q, k, v, keys, vals, plan, spec, out, sinks, slopes)

        return _AttentionCall(backend, group, run)

    def _state_call(
        self, item: StateStep, values: list[torch.Tensor | None], step: StepInputs
    ) -> Call:
        arguments = [None if n is None else values[n] for n in item.inputs]
        states, op = self._executable.states_of(item), STATE_OPS[item.spec.op]
        result = run_state_step(op, arguments, states, step)
        output = values[item.output] = self._take(result)
        output.copy_(result)
        return lambda _, step: output.copy_(run_state_step(op, arguments, states, step))

    def _head_call(
        self, item: object, values: list[torch.Tensor | None]
    ) -> tuple[TileFn, list[torch.Tensor], int]:
        """The last piece: it reads how many rows are wanted, which no shape fixes."""
        assert isinstance(item, TileStep)
        place = item.inputs.index(self._executable.layout.inputs["logits_index"])
        inputs = [values[number] for number in item.inputs]
        return self._executable.tile(item.tile), inputs, place  # type: ignore[return-value]


class _TileCall:
    """A tile with what it reads and where its results go."""

    def __init__(
        self, tile: TileFn, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        self._tile, self._inputs, self._outputs = tile, inputs, outputs

    def __call__(self, plans: StepPlans, step: StepInputs) -> None:
        self.run()

    def run(self) -> None:
        """Run it; the list is copied because compiled code empties the one it gets."""
        torch._foreach_copy_(self._outputs, self._tile(self._inputs.copy()))


class _AttentionCall:
    """An attention with everything but its plan.

    Args:
        backend: makes the plan.
        group: KV group that the plan is for.
        run: the attention over a plan.
    """

    def __init__(
        self, backend: AttentionBackend, group: int, run: Callable[[AttentionPlan], None]
    ) -> None:
        self._backend, self._group, self._run = backend, group, run

    def __call__(self, plans: StepPlans, step: StepInputs) -> None:
        self._run(plans.get(self._backend, self._group))

    def planned(self, plans: StepPlans) -> Callable[[], None]:
        """The call with a plan that holds for every step: it points to the inputs of the shape."""
        return partial(self._run, plans.get(self._backend, self._group))


def _pad(buffer: torch.Tensor, value: torch.Tensor, padding: int) -> None:
    """Copy `value` to the front of `buffer` along its last dimension and fill the rest."""
    count = value.shape[-1]
    if count == buffer.shape[-1]:
        buffer.copy_(value)
        return
    buffer[..., :count] = value
    buffer[..., count:] = padding
