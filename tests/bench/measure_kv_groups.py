"""Context tokens that run together in 1 GiB: python tests/bench/measure_kv_groups.py.

Drives the scheduler without a model, with the layers of Gemma 3 270M in one group and in KV groups,
until it first preempts or a request ends.
"""

from __future__ import annotations

from girih.kernels.kv.groups import KVCachePlan, KVCacheSpec, one_group, plan_groups
from girih.runtime.records.config import SchedulerConfig
from girih.runtime.records.plans import ModelRunnerOutput
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler

BUDGET_BYTES, BLOCK_SIZE, STEP_TOKENS, MAX_MODEL_LEN = 1 << 30, 32, 1024, 32768
# One KV head of 256, bfloat16; every sixth layer sees everything.
LAYERS = [KVCacheSpec(1, 256, 256, 2, window=0 if i % 6 == 5 else 512) for i in range(18)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def new_scheduler(plan: KVCachePlan, length: int) -> Scheduler:
    """A scheduler with more requests of `length` tokens than the cache can hold."""
    num_blocks = BUDGET_BYTES // plan.block_bytes
    cache = KVCacheManager(num_blocks, BLOCK_SIZE, True, plan.groups, 2 * STEP_TOKENS)
    limits = SchedulerConfig(max_num_seqs=100_000, max_num_batched_tokens=STEP_TOKENS)
    scheduler = Scheduler(limits, cache, MAX_MODEL_LEN)
    for number in range(8 * num_blocks * BLOCK_SIZE // length):
        prompt = [(number * 7919 + i) % 30000 for i in range(length)]
        scheduler.add_request(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=GREEDY)
        )
    return scheduler


def most_tokens(scheduler: Scheduler) -> int:
    """Context tokens of the requests that decode together, at most."""
    most = 0
    while not scheduler.num_preemptions and not scheduler.finished:
        plan = scheduler.schedule()
        assert plan is not None, "there is always something to compute"
        requests = scheduler.requests
        sampled = {i: [7] for i in plan.num_scheduled_tokens if requests[i].num_placeholders}
        scheduler.update(ModelRunnerOutput(plan.step_id, sampled))
        decoding = [r for r in scheduler.running if r.num_output_tokens]
        most = max(most, sum(r.num_computed_tokens for r in decoding))
    return most


def main() -> None:
    """Print a row per length."""
    plans = one_group(LAYERS, BLOCK_SIZE), plan_groups(LAYERS, BLOCK_SIZE, MAX_MODEL_LEN)
    print("tokens per request   one group   KV groups   ratio")
    for length in (600, 1024, 2048, 8192, 32000):
        one, many = (most_tokens(new_scheduler(plan, length)) for plan in plans)
        print(f"{length:18} {one:11,} {many:11,} {many / one:7.2f}")


if __name__ == "__main__":
    main()
