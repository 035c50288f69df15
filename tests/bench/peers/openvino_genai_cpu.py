"""OpenVINO GenAI with continuous batching: openvino_genai_cpu.py EXPORTED_MODEL WORKLOADS.

Its KV cache is set to bfloat16, the type it computes in on processors that have it.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai
from workloads import Prompts, run_all


def main(model: str, file: str) -> None:
    """Load the model and run the workloads."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    properties = {"KV_CACHE_PRECISION": "bf16"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts: Prompts, num_tokens: int) -> list[int]:
        how = openvino_genai.GenerationConfig()
        how.min_new_tokens = how.max_new_tokens = num_tokens
        how.ignore_eos, how.do_sample = True, False
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [len(out.m_generation_ids[0]) for out in pipeline.generate(ids, [how] * len(ids))]

    run_all(file, "openvino", generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
