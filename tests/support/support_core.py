"""Build an engine core over a `FakeRunner`, make requests for it, run it to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support_fake_runner import FakeRunner

from girih.kernels.kv.groups import FULL, KVCacheGroup
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.config import SchedulerConfig
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler


def make_core(
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    runner: Any = None,
    async_scheduling: bool = False,
    groups: Sequence[KVCacheGroup] = (FULL,),
    plans_in_flight: int = 2,
    task: str = "generate",
    **scheduler: Any,
) -> Any:
    """A core over `runner` (a new `FakeRunner` by default); the rest goes to SchedulerConfig.

    Typed as Any: tests look into whichever runner they gave it.
    """
    config = SchedulerConfig(**scheduler)
    lookahead = plans_in_flight * config.max_num_batched_tokens
    kv_cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching, groups, lookahead)
    return EngineCore(
        Scheduler(config, kv_cache, max_model_len, task=task),
        runner or FakeRunner(block_size, groups=groups),
        async_scheduling,
    )


def make_request(
    request_id: str,
    prompt: int | list[int] = 8,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    eos_token_ids: tuple[int, ...] = (),
    cache_salt: str | None = None,
    **sampling: Any,
) -> EngineRequest:
    """A request with the given prompt, or with a prompt of so many tokens of its own."""
    if isinstance(prompt, int):
        start = sum(request_id.encode()) * 31
        prompt = [(start + i * 7) % 1000 for i in range(prompt)]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        eos_token_ids=eos_token_ids,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
    )


def core_of(llm: Any) -> Any:
    """The core that an `LLM` runs in this process (Any: tests look into its runner)."""
    return engine_of(llm).core


def engine_of(llm: Any) -> Any:
    """What was built for an `LLM` that runs its core in this process."""
    return llm._client._client.transport.engine


@dataclass
class Collected:
    """Everything the core said about one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[EngineOutput] = field(default_factory=list)


def collect(into: dict[str, Collected], outputs: list[EngineOutput]) -> None:
    """Add outputs to what is known; nothing may come after the end of a request."""
    for output in outputs:
        entry = into.setdefault(output.request_id, Collected())
        assert entry.finish_reason is None, f"{output.request_id}: output after its end"
        entry.tokens += output.new_token_ids
        entry.finish_reason = output.finish_reason
        entry.outputs.append(output)


def run_to_end(core: EngineCore, max_steps: int = 5000) -> dict[str, Collected]:
    """Step until no work is left; checks integrity and the fake KV after every step."""
    collected: dict[str, Collected] = {}
    for _ in range(max_steps):
        if not core.has_work():
            return collected
        collect(collected, core.step())
        core.check_integrity()
        violations = getattr(core.runner, "violations", [])
        assert not violations, violations
    raise AssertionError(f"no end after {max_steps} steps")
