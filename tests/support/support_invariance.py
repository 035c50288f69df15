"""Asks one engine the same requests alone and in random company, and compares bits.

`python support_invariance.py < job.json > answer.json`, a job being
{"model", "options": {of LLM}, "lengths", "trials"}. A process of its own: it loads kernels.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any


def run_invariance(job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run a job in another process: {"compared", "different": [what, ...], "cached", ...}."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _params(index: int) -> Any:
    from girih import SamplingParams

    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": index},
        {"temperature": 0.7, "seed": index, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 1.1, "seed": index, "top_k": 20, "min_p": 0.02},
    ]
    rest = {
        "max_tokens": 5 + 4 * (index % 7),
        "ignore_eos": True,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }
    if index % 3:  # a scored prompt is never taken from the prefix cache
        del rest["prompt_logprobs"]
    return SamplingParams(**ways[index % 4], **rest)


def _bits(output: Any) -> list[Any]:
    """Everything the model computed for a request; floats compare exactly."""
    completion = output.outputs[0]
    chosen = [(r.logprob, list(r.top_logprobs)) for r in completion.logprobs]
    prompt = [(r.logprob, list(r.top_logprobs)) for r in output.prompt_logprobs or [] if r]
    return [list(completion.token_ids), chosen, prompt]


def main() -> None:
    """Serve one job."""
    answer_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    job = json.load(sys.stdin)
    from support_core import core_of

    from girih import LLM

    alone, compared, different, cached = [], 0, [], 0
    rng = random.Random(job.get("seed", 0))
    lengths = job["lengths"]
    for options in job["options"]:
        llm = LLM(job["model"], **options)
        size = llm.facts.vocab_size
        if not alone:
            draw = random.Random(1)
            common = [draw.randrange(size) for _ in range(max(lengths) // 2)]
            prompts = [
                (common if i % 2 else [])[:n] + [draw.randrange(size) for _ in range(n)]
                for i, n in enumerate(lengths)
            ]
            for index, prompt in enumerate(prompts):
                llm.reset_prefix_cache()
                alone.append(_bits(llm.generate([prompt], _params(index))[0]))
        for trial in range(job["trials"]):
            if trial % 2:
                llm.reset_prefix_cache()
            order = rng.sample(range(len(prompts)), rng.randint(1, len(prompts)))
            outputs = llm.generate([prompts[i] for i in order], [_params(i) for i in order])
            for index, output in zip(order, outputs, strict=True):
                compared += 1
                cached += output.num_cached_tokens
                if _bits(output) != alone[index]:
                    different.append([str(options), trial, index])
        preemptions = core_of(llm).stats().num_preemptions
        llm.close()
    json.dump(
        {
            "compared": compared,
            "different": different,
            "cached": cached,
            "preemptions": preemptions,
            "distinct": len({json.dumps(bits) for bits in alone}),
        },
        answer_file,
    )
    answer_file.close()


if __name__ == "__main__":
    main()
