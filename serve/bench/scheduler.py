"""Measures a step's cost in the scheduler and the block pool, without any model.

decode   N running requests, one token each
mixed    the same, and in every step one ends and one arrives whose prompt of 512 tokens is half
         in the prefix cache and computed in chunks

A case is played to a `SchedulerDriver`, so that another engine's scheduler can be given the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from girih.runtime.records.config import SchedulerConfig
from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler

NUM_RUNNING = (1, 64, 256, 1024)
CASES = ("decode", "mixed")
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 512
PREFILL_BUDGET = 256
WARM_UP_STEPS = 5
TOKEN = 7  # what every step samples


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


@dataclass(frozen=True)
class Sizes:
    """Sizes of a scheduler.

    Attributes:
        num_running: requests in each step.
        num_steps: that are measured.
    """

    num_running: int
    num_steps: int

    @property
    def max_tokens(self) -> int:
        """Output tokens a request may have: more than any gets."""
        num_prefill_steps = self.num_running * PROMPT_TOKENS // PREFILL_BUDGET + 1
        return self.num_steps + WARM_UP_STEPS + 2 * num_prefill_steps

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return LONG_PROMPT_TOKENS + self.max_tokens

    @property
    def num_blocks(self) -> int:
        """KV blocks, enough for everything."""
        return (self.num_running + 8) * (self.max_model_len // BLOCK_SIZE + 2)

    @property
    def max_num_seqs(self) -> int:
        """Requests in one step."""
        return self.num_running + 1

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in one step."""
        return self.num_running + PREFILL_BUDGET


class Step(Protocol):
    """The result of one step."""

    @property
    def schedule_seconds(self) -> float:
        """CPU time to make the plan."""

    @property
    def update_seconds(self) -> float:
        """CPU time to digest the result."""

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each request in the plan, in its order."""


class SchedulerDriver(Protocol):
    """A scheduler that can be told what happens."""

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """A request arrives."""

    def abort_oldest(self) -> None:
        """The first of the running requests ends."""

    def num_decoding(self) -> int:
        """Running requests whose prompt is computed."""

    def step(self) -> Step:
        """Make a plan, take a token for whoever is due one, and digest it."""


def measure_scheduler(num_steps: int) -> Iterator[SchedulerCost]:
    """Measure every case over `num_steps` steps."""
    for num_running in NUM_RUNNING:
        for case in CASES:
            sizes = Sizes(num_running, num_steps)
            yield cost_of(case, sizes, play(case, sizes, GirihDriver(sizes)))


def cost_of(case: str, sizes: Sizes, steps: list[Step]) -> SchedulerCost:
    """The medians of a case's steps."""

    def median_us(of: Callable[[Step], float]) -> float:
        return sorted(map(of, steps))[len(steps) // 2] * 1e6

    schedule = median_us(lambda step: step.schedule_seconds)
    update = median_us(lambda step: step.update_seconds)
    return SchedulerCost(case, sizes.num_running, schedule, update)


def play(case: str, sizes: Sizes, driver: SchedulerDriver) -> list[Step]:
    """Play a case; returns its measured steps."""
    for number in range(sizes.num_running):
        driver.arrive(f"r{number}", _prompt(number, PROMPT_TOKENS, 0), sizes.max_tokens)
    while driver.num_decoding() < sizes.num_running:
        driver.step()
    steps = []
    for number in range(sizes.num_running, sizes.num_running + WARM_UP_STEPS + sizes.num_steps):
        if case == "mixed":
            prompt = _prompt(number, LONG_PROMPT_TOKENS, LONG_PROMPT_TOKENS // 2)
            driver.abort_oldest()
            driver.arrive(f"r{number}", prompt, sizes.max_tokens)
        steps.append(driver.step())
    return steps[WARM_UP_STEPS:]


def _prompt(number: int, length: int, shared: int) -> list[int]:
    return list(range(shared)) + [number * 31 % 5000 + i for i in range(length - shared)]


@dataclass(frozen=True)
class TimedStep:
    """See `Step`."""

    schedule_seconds: float
    update_seconds: float
    num_tokens: list[int]


class GirihDriver:
    """girih's own scheduler.

    Args:
        sizes: what it is made for.
    """

    def __init__(self, sizes: Sizes) -> None:
        limits = SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            long_prefill_token_threshold=0,  # as large steps as the other side plans
        )
        kv_cache = KVCacheManager(sizes.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, kv_cache, sizes.max_model_len)

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """See `SchedulerDriver.arrive`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        )

    def abort_oldest(self) -> None:
        """See `SchedulerDriver.abort_oldest`."""
        self.scheduler.finish_requests([self.scheduler.running[0].request_id], "abort")

    def num_decoding(self) -> int:
        """See `SchedulerDriver.num_decoding`."""
        return sum(r.num_tokens > r.num_prompt_tokens for r in self.scheduler.running)

    def step(self) -> TimedStep:
        """See `SchedulerDriver.step`."""
        started = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None, "there is always something to compute"
        result = self._run(plan)
        ran = time.thread_time()
        self.scheduler.update(result)
        updated = time.thread_time()
        num_tokens = list(plan.num_scheduled_tokens.values())
        return TimedStep(planned - started, updated - ran, num_tokens)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A token for every request whose last known token is in the plan."""
        requests = self.scheduler.requests
        sampled = {
            request_id: [TOKEN]
            for request_id in plan.num_scheduled_tokens
            if requests[request_id].num_placeholders
        }
        return ModelRunnerOutput(plan.step_id, sampled)
