"""Runs each step in the best mode that takes it: as captured for a padded shape, or as it is.

    step ─▶ Dispatcher ─▶ FULL, PIECEWISE ─▶ StepReplay of its descriptor ─▶ logits
                       ╰▶ NONE ─▶ Executable.compute ─────────────────────▶ logits

Captures are made by a `StepCapture`, one per descriptor, when its first step comes or beforehand.
It owns the buffers that captured steps read and write, so logits hold until the next step only.
What a capture is bound to (tiles, weights, KV cache) may be exchanged between steps: then all
captures go, before the executable lets go of it. `StaticSteps` is the one for the CPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from girih.graph.execute.batch_descriptor import BatchDescriptor
from girih.graph.execute.executable import Executable
from girih.graph.execute.static_step import StaticSteps
from girih.graph.execute.step_inputs import StepInputs
from girih.runtime.records.config import RuntimeConfig, SchedulerConfig
from girih.runtime.step.buckets import (
    Dispatcher,
    Mode,
    ReplayCounts,
    ReplayStats,
    chosen_sizes,
)

AUTO = {"cpu": Mode.NONE}
"""The mode that `runtime.replay=auto` takes per device, as measured (README.md)."""


class StepReplay(Protocol):
    """A step captured for one descriptor."""

    def run(self, step: StepInputs) -> torch.Tensor:
        """Copy a step that fits the descriptor to the captured inputs, padded, and replay.

        Returns:
            Logits [S, V] in a buffer that the next step overwrites; [0, 1] when S is 0.
        """


class StepCapture(Protocol):
    """Captures steps of one executable, and owns the memory they share."""

    def why_not(self, is_whole: bool) -> str | None:
        """Why steps cannot be captured with attention and head (or without), or None."""

    def capture(self, shape: BatchDescriptor) -> StepReplay:
        """Make the replay of one descriptor; larger ones first keep the memory small."""

    def forget(self) -> None:
        """Give the memory up; replays made so far do not run any more."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""


class ReplayManager:
    """Runs the steps of one executable.

    Args:
        executable: runs what is not captured; tells when captures are out of date.
        capture: captures.
        dispatcher: chooses.

    Attributes:
        explanation: how the last step ran, and why not better.
    """

    def __init__(
        self, executable: Executable, capture: StepCapture, dispatcher: Dispatcher
    ) -> None:
        self.executable = executable
        self.explanation = ""
        self._capture = capture
        self._dispatcher = dispatcher
        self._replays: dict[BatchDescriptor, StepReplay] = {}
        self._counts = ReplayCounts()
        executable.when_changed = self.forget

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run one step.

        Returns:
            As `Executable.run`, valid until the next step.

        Raises:
            EngineError: see `Executable.begin_step`.
        """
        tokens = step.num_tokens
        self.executable.begin_step(step)
        taken = self._dispatcher.choose(tokens, step.num_requests, step.logits_index.shape[0])
        is_new = taken.descriptor is not None and taken.descriptor not in self._replays
        if taken.descriptor is None:
            logits = self.executable.compute(step)
        else:
            if is_new:
                self._replays[taken.descriptor] = self._capture.capture(taken.descriptor)
            logits = self._replays[taken.descriptor].run(step)
        self._counts.note(taken, tokens, is_new)
        self.explanation = taken.as_text(tokens)
        return logits

    def stats(self) -> ReplayStats:
        """Counts up to now."""
        return self._counts.stats(self._capture.num_bytes)

    def forget(self) -> None:
        """Give up all captures; shapes are captured anew when steps need them."""
        if self._replays:
            self._replays.clear()
            self._capture.forget()


def manage_replays(
    executable: Executable, runtime: RuntimeConfig, limits: SchedulerConfig, max_model_len: int
) -> ReplayManager:
    """The manager of an executable, as configured.

    Args:
        executable: whose steps.
        runtime: the modes and buckets that are wanted.
        limits: of a step.
        max_model_len: longest request, in tokens.

    Raises:
        ConfigError: a bucket that no step can fill.
    """
    best = AUTO["cpu"] if runtime.replay == "auto" else Mode(runtime.replay)
    requests = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    tokens = limits.max_num_batched_tokens
    sizes = (
        chosen_sizes("runtime.replay_tokens", runtime.replay_tokens, tokens),
        chosen_sizes("runtime.replay_requests", runtime.replay_requests, requests),
    )
    max_tokens = Dispatcher(best, *sizes).max_tokens
    capture = StaticSteps(executable, max_tokens, -(-max_model_len // executable.block_size))
    unsupported = {
        mode: why
        for mode, is_whole in ((Mode.FULL, True), (Mode.PIECEWISE, False))
        if (why := capture.why_not(is_whole)) is not None
    }
    return ReplayManager(executable, capture, Dispatcher(best, *sizes, unsupported))
