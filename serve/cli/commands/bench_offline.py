"""`girih bench offline`: fixed workloads of random token ids, one RESULT line each."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.records import to_record
from girih.runtime.inspect.machine_load import OtherWork
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.config import BenchConfig
from girih.serve.progress import ProgressDisplay

if TYPE_CHECKING:
    from girih.serve.offline.llm import LLM

WORKLOADS = Path(__file__).parents[3] / "conf" / "bench" / "workloads.json"
WARM_UP_IDS = list(range(10, 26))
KEEPS_CACHE = "prefix"  # the workload that measures prefix caching


def run(words: list[str], options: Options) -> int:
    """Measure every workload and print its line."""
    config = compose_config("bench offline", words)
    bench = to_record(BenchConfig, config["bench"])
    workloads = read_workloads(bench)
    engine = engine_of(config)
    started = time.perf_counter()
    from girih.serve.offline.llm import LLM

    with ProgressDisplay(options.quiet) as progress:
        llm = LLM.from_config(engine, progress)
    llm.generate([WARM_UP_IDS], _params(4))
    print(f"READY {time.perf_counter() - started:.2f}", flush=True)
    others = OtherWork()
    for spec, prompts in workloads:
        print(f"RESULT {json.dumps(measure(llm, spec, prompts, bench.rounds))}", flush=True)
    if others.remark() and not options.quiet:
        print(others.remark(), file=sys.stderr)
    return 0


def read_workloads(bench: BenchConfig) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """Return (description, prompts) of each chosen workload.

    Raises:
        ConfigError: an unreadable file, or a workload that is not in it.
    """
    file = Path(bench.workload_file) if bench.workload_file else WORKLOADS
    try:
        document = json.loads(file.read_text("utf-8"))
        low, high = document["token_range"]
        specs = document["workloads"]
        known = [spec["name"] for spec in specs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"workload_file {file} cannot be read: {error}") from error
    missing = [name for name in bench.workloads if name not in known]
    if missing:
        raise ConfigError(f"workload '{missing[0]}' is not in the file; it has {', '.join(known)}")
    chosen = [spec for spec in specs if not bench.workloads or spec["name"] in bench.workloads]
    return [(spec, list(make_prompts(spec, low, high))) for spec in chosen]


def make_prompts(spec: dict[str, Any], low: int, high: int) -> Iterator[list[int]]:
    """Yield a workload's prompts: one generator draws the shared prefix, then each prompt."""
    draw = random.Random(spec["seed"])

    def ids(count: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(count)]

    shared = ids(spec["shared_prefix"])
    for _ in range(spec["num_requests"]):
        yield shared + ids(spec["prompt_len"])


def measure(
    llm: LLM, spec: dict[str, Any], prompts: list[list[int]], rounds: int
) -> dict[str, Any]:
    """Return the result of one workload: the best wall time of all its requests together."""
    params = _params(spec["output_len"])
    best = float("inf")
    for _ in range(rounds):
        if spec["name"] != KEEPS_CACHE:
            llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(list(prompts), params)
        best = min(best, time.perf_counter() - started)
    num_output = len(prompts) * spec["output_len"]
    num_total = num_output + sum(len(prompt) for prompt in prompts)
    return {
        "engine": "girih",
        "workload": spec["name"],
        "seconds": round(best, 4),
        "output_tok_s": round(num_output / best, 2),
        "total_tok_s": round(num_total / best, 2),
    }


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
