"""How a decode step's time divides: inside tiles, inside attention, and between the pieces.

    python tests/bench/measure_pieces.py [--model smollm2] [--opt O2] [--steps 40]

What lies between is all that compiling larger regions (whole layers, or the whole graph) could
save: tiles already hold everything from one attention to the next. One line per number of
requests, each with a context of 128 tokens; medians over the steps, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import find_support  # noqa: F401
from measure_replay import CONTEXT, step
from support_core import core_of

from girih.graph.execute.executable import Executable
from girih.kernels.attention.backends import AttentionBackend
from girih.serve.offline.llm import LLM


class Stopwatch:
    """Adds up the seconds that wrapped functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - started
            self.calls += 1
            return result

        return timed


def divide(executable: Executable, requests: int, steps: int) -> tuple[list[float], int]:
    """Median ms of (whole step, tiles, attention), and the pieces of a step."""
    tiles, attention = Stopwatch(), Stopwatch()
    backends: set[AttentionBackend] = {choice.backend for choice in executable.backends}
    for key in executable.layout.tile_counts:
        executable.replace_tile(key, tiles.around(executable.tile(key)))
    usual = {backend: backend.run for backend in backends}
    for backend in backends:
        backend.run = attention.around(usual[backend])  # type: ignore[method-assign]
    rows = []
    for done in range(CONTEXT, CONTEXT + steps):
        inputs = step(executable, [1] * requests, done)
        tiles.seconds = attention.seconds = 0.0
        tiles.calls = attention.calls = 0
        started = time.perf_counter()
        executable.run(inputs)
        rows.append((time.perf_counter() - started, tiles.seconds, attention.seconds))
    for backend in backends:
        backend.run = usual[backend]  # type: ignore[method-assign]
    medians = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
    return medians, tiles.calls + attention.calls


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--opt", default="O2")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    llm = LLM(asked.model, num_blocks=600, opt=asked.opt)
    executable = core_of(llm).runner.executable
    kept = {key: executable.tile(key) for key in executable.layout.tile_counts}
    for requests in (1, 8, 32):
        (whole, tiles, attention), pieces = divide(executable, requests, asked.steps)
        between = whole - tiles - attention
        print(
            f"{requests:3} requests: step {whole:.2f} ms = tiles {tiles:.2f} + attention "
            f"{attention:.2f} + between {pieces} pieces {between:.2f} ({between / whole:.1%})"
        )
        for key, tile in kept.items():
            executable.replace_tile(key, tile)
    llm.close()


if __name__ == "__main__":
    main()
