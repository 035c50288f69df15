"""Engines over fake runners that another process can build: functions and plain options only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support_core import make_core
from support_fake_runner import FakeRunner

from girih.kernels.base.errors import EngineError, SourceError
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.client.spawn import spawn_core
from girih.runtime.client.supervisor import CoreSupervisor
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import EngineFacts

WAIT_SECONDS = 20


@dataclass
class FakeEngine:
    """What building returns."""

    core: EngineCore
    facts: EngineFacts


class RudeRunner(FakeRunner):
    """Keeps the interpreter to itself during a step."""

    hold_seconds = 0.0

    def execute(self, plan: Any) -> Any:
        ctypes.PyDLL(None).usleep(int(self.hold_seconds * 1e6))
        return super().execute(plan)


class DeadlyRunner(FakeRunner):
    """Kills its own process, as a crash in native code would.

    That is in step `kill_at`, or at the end of the first one for a prompt with the token `poison`.
    """

    def __init__(self, *args: Any, kill_at: int | None, poison: int | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kill_at = kill_at
        self.poison = poison

    def execute(self, plan: Any) -> Any:
        if self.num_steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if any(self.poison in request.token_ids for request in plan.new_requests):
            time.sleep(self.step_seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(plan)


def build(
    progress: Any,
    *,
    vocab_size: int = 1000,
    step_seconds: float = 0.0,
    lose_device_at: int | None = None,
    kill_at: int | None = None,
    poison: int | None = None,
    hold_interpreter_seconds: float = 0.0,
    build_seconds: float = 0.0,
    build_error: str | None = None,
    model_path: str = "",
    **options: Any,
) -> FakeEngine:
    """Make a core over a fake runner; `options` are those of `make_core`."""
    progress(ProgressEvent("model", 1, 1, "fake", model_path))
    progress(ProgressEvent("compile", 1, 3, "tile 1 of 3"))
    deadline = time.monotonic() + build_seconds
    while time.monotonic() < deadline:
        time.sleep(0.02)
        progress(ProgressEvent("compile", 2, 3, "tile 2 of 3"))
    if build_error is not None:
        raise SourceError(build_error)
    fail_at = {} if lose_device_at is None else {lose_device_at: EngineError("device lost")}
    settings = {"step_seconds": step_seconds, "fail_at": fail_at}
    runner = FakeRunner(16, vocab_size, **settings)
    if kill_at is not None or poison is not None:
        runner = DeadlyRunner(16, vocab_size, kill_at=kill_at, poison=poison, **settings)
    if hold_interpreter_seconds:
        runner = RudeRunner(16, vocab_size, **settings)
        runner.hold_seconds = hold_interpreter_seconds
    runner.plans = deque(maxlen=4)  # type: ignore[assignment]  # a soak makes very many
    options.setdefault("async_scheduling", True)
    core = make_core(runner=runner, **options)
    facts = EngineFacts(
        name="fake",
        key="fp_fake",
        model_path=model_path,
        max_model_len=options.get("max_model_len", 256),
        vocab_size=vocab_size,
    )
    return FakeEngine(core, facts)


def orphan(address_file: str) -> None:
    """Start a core, say which, and wait to be killed (the target of a process)."""
    supervisor = CoreSupervisor(build, restart=False, on_end=lambda error: None)
    supervisor.start()
    with open(address_file, "w") as file:
        file.write(str(supervisor.pid))
    time.sleep(60)


def leave_a_core_waiting(pid_file: str) -> None:
    """Start a core that is told nothing, say which, and wait to be killed."""
    core = spawn_core()
    with open(pid_file, "w") as file:
        file.write(str(core.process.pid))
    time.sleep(60)


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not waited for does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, at most `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
