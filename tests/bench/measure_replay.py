"""What the modes of `runtime.replay` cost per step, on one bound program, step by step in turn.

    python tests/bench/measure_replay.py [--model smollm2] [--steps 12] [--cpu]

R requests with contexts of 128 tokens each decode; the same step runs in every mode, one after the
other, and again for the next position, in another order, so that a busy moment of the machine hits
all of them alike.
"exact" buckets hold the step without padding; "derived" are those that the settings derive. One
line per case: milliseconds per step, median and fastest. `--cpu` counts the CPU time of one thread,
which others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time

import find_support  # noqa: F401
import torch
from support_core import core_of

from girih.graph.execute.executable import Executable
from girih.graph.execute.static_step import StaticSteps
from girih.graph.execute.step_inputs import StepInputs
from girih.kernels.attention.metadata import AttentionMetadata
from girih.runtime.step.buckets import Dispatcher, Mode, derived_sizes
from girih.runtime.step.replay import ReplayManager
from girih.serve.offline.llm import LLM

CONTEXT = 128
MAX_TOKENS, MAX_REQUESTS = 256, 64


def managers(executable: Executable) -> dict[str, ReplayManager]:
    """One per way of running a step, over one executable."""
    exact = list(range(1, MAX_TOKENS + 1))
    tokens, requests = derived_sizes(MAX_TOKENS), derived_sizes(MAX_REQUESTS)
    sizes = {
        "none": (Mode.NONE, exact, exact),
        "piecewise, exact": (Mode.PIECEWISE, exact, exact),
        "full, exact": (Mode.FULL, exact, exact),
        "piecewise, derived": (Mode.PIECEWISE, tokens, requests),
        "full, derived": (Mode.FULL, tokens, requests),
    }
    return {
        name: ReplayManager(executable, StaticSteps(executable, MAX_TOKENS, 64), Dispatcher(*parts))
        for name, parts in sizes.items()
    }


def step(executable: Executable, counts: list[int], done: int) -> StepInputs:
    """A step in which request i adds counts[i] tokens to a context of `done`."""
    size = executable.block_size
    per_request = -(-(CONTEXT * 2) // size)
    positions = torch.cat([torch.arange(done, done + n) for n in counts])
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    table = torch.arange(1, len(counts) * per_request + 1, dtype=torch.int32)
    table = table.view(len(counts), per_request)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return StepInputs(
        ids=(positions * 31 + rows * 17) % 1000,
        positions=positions,
        logits_index=starts[1:] - 1,
        attention=AttentionMetadata(
            query_start=starts.int(),
            seq_lens=torch.tensor([done + n for n in counts], dtype=torch.int32),
            block_tables=(table,),
            slot_mappings=(table[rows, positions // size].long() * size + positions % size,),
        ),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", default="1,8,32,5,27,mixed")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread, not the wall")
    asked = parser.parse_args()
    clock = time.thread_time if asked.cpu else time.perf_counter
    llm = LLM(asked.model, num_blocks=600, **({"threads": 1} if asked.cpu else {}))
    executable = core_of(llm).runner.executable
    ways = managers(executable)
    for case in asked.cases.split(","):
        counts = [1] * 15 + [26] if case == "mixed" else [1] * int(case)
        times: dict[str, list[float]] = {name: [] for name in ways}
        with torch.inference_mode():
            for number in range(asked.steps + 2):
                inputs = step(executable, counts, CONTEXT + number)
                turn = number % len(ways)
                for name in (*list(ways)[turn:], *list(ways)[:turn]):
                    begun = clock()
                    ways[name].run(inputs)
                    if number >= 2:  # the first captures
                        times[name].append((clock() - begun) * 1e3)
        base = statistics.median(times["none"])
        for name, values in times.items():
            middle = statistics.median(values)
            print(
                f"{case:>6} {name:20} {middle:8.2f} {min(values):8.2f} ms  "
                f"{middle / base - 1:+.1%}",
                flush=True,
            )
    for name, manager in ways.items():
        print(name, manager.stats())


if __name__ == "__main__":
    main()
