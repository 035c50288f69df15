"""The workloads as other engines need them: token ids in, a `RESULT {json}` line out.

Runs in the peers' environments, which have no girih.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

Prompts = list[list[int]]


def run_all(file: str, engine: str, generate: Callable[[Prompts, int], list[int]]) -> None:
    """Time every workload and print its result.

    Args:
        file: the workloads, as JSON.
        engine: its name.
        generate: given prompts and a number of output tokens, returns how many tokens each got.
    """
    document = json.loads(Path(file).read_text())
    low, high = document["token_range"]
    generate([list(range(low, low + 32))], 4)  # what is loaded on first use
    for workload in document["workloads"]:
        draw = random.Random(workload["seed"])

        def tokens(count: int, draw: random.Random = draw) -> list[int]:
            return [draw.randrange(low, high) for _ in range(count)]

        shared, count = tokens(workload["shared_prefix"]), workload["num_requests"]
        prompts = [shared + tokens(workload["prompt_len"]) for _ in range(count)]
        started = time.perf_counter()
        lengths = generate(prompts, workload["output_len"])
        seconds = time.perf_counter() - started
        assert lengths == [workload["output_len"]] * count, lengths
        made, read = sum(lengths), sum(map(len, prompts))
        result = {
            "engine": engine,
            "workload": workload["name"],
            "seconds": round(seconds, 4),
            "output_tok_s": round(made / seconds, 2),
            "total_tok_s": round((made + read) / seconds, 2),
        }
        print("RESULT " + json.dumps(result), flush=True)
