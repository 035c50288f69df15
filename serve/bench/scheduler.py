"""What one step costs in the scheduler and the block pool, without any model.

decode   N running requests, one token each
mixed    the same, and in every step one ends and one arrives whose prompt of 512 tokens is half
         in the prefix cache and computed in chunks
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from girih.runtime.config import SchedulerConfig
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput
from girih.runtime.kv_cache import KVCacheManager
from girih.runtime.request import EngineRequest
from girih.runtime.sampling_params import SamplingParams
from girih.runtime.scheduler import Scheduler

NUM_RUNNING = (1, 64, 256, 1024)
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 512
PREFILL_BUDGET = 256
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class SchedulerCost:
    """Result of one case.

    Attributes:
        case: "decode" or "mixed".
        num_running: requests in each step.
        schedule_us: median CPU time to make a plan, in microseconds.
        update_us: median time to digest its result.
    """

    case: str
    num_running: int
    schedule_us: float
    update_us: float

    @property
    def total_us(self) -> float:
        """Both together."""
        return self.schedule_us + self.update_us


def measure_scheduler(num_steps: int) -> Iterator[SchedulerCost]:
    """Measure every case over `num_steps` steps."""
    for num_running in NUM_RUNNING:
        for case in ("decode", "mixed"):
            yield _SchedulerRun(num_running, num_steps).measure(case)


class _SchedulerRun:
    """One scheduler with `num_running` requests."""

    def __init__(self, num_running: int, num_steps: int) -> None:
        self._num_running = num_running
        self._num_steps = num_steps
        num_prefill_steps = num_running * PROMPT_TOKENS // PREFILL_BUDGET + 1
        self._max_tokens = num_steps + WARM_UP_STEPS + 2 * num_prefill_steps
        length = LONG_PROMPT_TOKENS + self._max_tokens
        blocks = (num_running + 8) * (length // BLOCK_SIZE + 2)
        limits = SchedulerConfig(
            max_num_seqs=num_running + 1, max_num_batched_tokens=num_running + PREFILL_BUDGET
        )
        self._scheduler = Scheduler(limits, KVCacheManager(blocks, BLOCK_SIZE), length)
        self._next = 0

    def measure(self, case: str) -> SchedulerCost:
        """Run the case and return the medians."""
        for _ in range(self._num_running):
            self._arrive(PROMPT_TOKENS, shared=0)
        while len(self._scheduler.running) < self._num_running or self._has_prefills():
            self._step()
        times = []
        for step in range(WARM_UP_STEPS + self._num_steps):
            if case == "mixed":
                self._scheduler.finish_requests([self._scheduler.running[0].request_id], "abort")
                self._arrive(LONG_PROMPT_TOKENS, shared=LONG_PROMPT_TOKENS // 2)
            times.append(self._step())
            if step + 1 == WARM_UP_STEPS:
                times.clear()
        schedule, update = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
        return SchedulerCost(case, self._num_running, schedule * 1e6, update * 1e6)

    def _has_prefills(self) -> bool:
        return any(r.num_tokens == r.num_prompt_tokens for r in self._scheduler.running)

    def _step(self) -> tuple[float, float]:
        started = time.thread_time()
        plan = self._scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None, "there is always something to compute"
        result = self._run(plan)
        ran = time.thread_time()
        self._scheduler.update(result)
        return planned - started, time.thread_time() - ran

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A token for every request whose last known token is in the plan."""
        requests = self._scheduler.requests
        sampled = {
            request_id: [7]
            for request_id in plan.num_scheduled_tokens
            if requests[request_id].num_placeholders
        }
        return ModelRunnerOutput(plan.step_id, sampled)

    def _arrive(self, length: int, shared: int) -> None:
        number, self._next = self._next, self._next + 1
        prompt = list(range(shared)) + [number * 31 % 5000 + i for i in range(length - shared)]
        sampling = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        self._scheduler.add_request(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
        )
