"""What an int8 KV cache changes: python tests/bench/measure_kv_dtype.py [accuracy] [speed].

accuracy   logits of all prompt tokens, and 64 greedy tokens, of the end-to-end prompts
speed      decode steps of SmolLM2 over a long context that is in the prefix cache
"""

from __future__ import annotations

import sys
import time

import find_support  # noqa: F401
from support_hf_reference import prompt_logits, prompt_token_ids

from girih import LLM, SamplingParams

LONG, NUM_TOKENS, NUM_SEQS = 4096, 64, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def new_llm(kv_dtype: str, dtype: str) -> LLM:
    """SmolLM2 on one kind of cache."""
    return LLM("smollm2", dtype=dtype, kv_dtype=kv_dtype, max_model_len=8192, max_num_seqs=32)


def accuracy(dtype: str) -> None:
    """Print how far int8 is from the model's own cache."""
    one, other = (new_llm(kind, dtype) for kind in ("auto", "int8"))
    prompts = prompt_token_ids(one.facts.model_path)
    error = norm = same_best = tokens = 0.0
    for prompt in prompts:
        exact, found = prompt_logits(one, prompt), prompt_logits(other, prompt)
        error += float((found - exact).square().sum())
        norm += float(exact.square().sum())
        same_best += float((found.argmax(-1) == exact.argmax(-1)).sum())
        tokens += len(prompt)
    print(f"{dtype}: relative RMSE of logits {(error / norm) ** 0.5:.4f}")
    print(f"{dtype}: most likely token equal at {same_best / tokens:.1%} of {tokens:.0f} positions")
    pairs = list(zip(*(generated(llm, prompts) for llm in (one, other)), strict=True))
    equal = [a == b for pair in pairs for a, b in zip(*pair, strict=True)]
    whole = sum(a == b for a, b in pairs)
    print(
        f"{dtype}: {whole} of {len(pairs)} outputs equal, {sum(equal) / len(equal):.1%} of tokens"
    )


def generated(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def speed(dtype: str) -> None:
    """Print decode throughput over a context of `LONG` tokens, alone and several at once."""
    for kind in ("auto", "int8", "auto", "int8"):
        llm = new_llm(kind, dtype)
        prompt = [(7919 * i) % 40000 + 10 for i in range(LONG)]
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        rates = []
        for count in (1, NUM_SEQS):
            llm.generate([prompt] * count, SamplingParams(temperature=0.0, max_tokens=2))
            started = time.perf_counter()
            llm.generate([prompt] * count, GREEDY)
            rates.append(count * NUM_TOKENS / (time.perf_counter() - started))
        print(f"{dtype} {kind}: {rates[0]:.1f} tok/s alone, {rates[1]:.1f} for {NUM_SEQS}")
        llm.close()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["accuracy", "speed"]
    if "accuracy" in wanted:
        accuracy("bfloat16")
    if "speed" in wanted:
        speed("bfloat16")
