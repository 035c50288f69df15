"""A process that compiles tiles: `python -m girih.graph.compile_worker`.

Reads one JSON job per line from stdin, {"tile": FILE, "package": FILE, "target": {...}}, and
answers one JSON line per job, {"error": null | text, "seconds": float}. Tiles compile in processes
because Inductor keeps global state; the parent starts them early, so that importing torch overlaps
with tracing. They yield to the parent, whose tracing everything else waits for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import IO

NICENESS = 10


def main() -> None:
    """Serve jobs until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Inductor or a compiler prints must not mix with the answers
    _warm_up()
    for line in sys.stdin:
        _answer(json.loads(line), answers)


def _warm_up() -> None:
    """Import what every job needs; compiling makes few cycles, so the collector only costs time."""
    import gc
    import importlib

    gc.disable()
    os.nice(NICENESS)
    for module in ("torch._inductor.compile_fx", "girih.graph.inductor"):
        importlib.import_module(module)


def _answer(job: dict[str, object], answers: IO[str]) -> None:
    from girih.graph.inductor import compile_tile
    from girih.graph.tile_file import read_tile
    from girih.kernels.errors import GirihError
    from girih.kernels.target import Target

    started = time.perf_counter()
    error = None
    try:
        target = Target(**job["target"])  # type: ignore[arg-type]
        compile_tile(read_tile(Path(str(job["tile"]))), Path(str(job["package"])), target)
    except GirihError as failure:
        error = str(failure)
    seconds = time.perf_counter() - started
    answers.write(json.dumps({"error": error, "seconds": seconds}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
