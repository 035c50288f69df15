"""The process that compiles tiles: `python -m girih.graph.tiles.worker`.

Reads one JSON line, {"tiles": [[FILE, PACKAGE], ...], "target": {...}, "at_once": N}, and answers
one JSON line per tile when it is done, {"package": PACKAGE, "error": null | text, "seconds": S}.

Inductor keeps global state, so every tile compiles in a process of its own. They are forks of this
one, which imports and warms Inductor once, while the parent traces: seconds of work that each
process would otherwise repeat. Nothing here starts threads before a fork. All of them yield to the
parent, whose tracing everything else waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

NICENESS = 10


def main() -> None:
    """Serve requests until stdin closes."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Inductor or a compiler prints must not mix with the answers
    _warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        for answer in compile_all(request["tiles"], request["target"], request["at_once"]):
            _say(answers, answer)


def end_with_parent() -> None:
    """Have the kernel end this process group when the parent dies, however it dies."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def compile_all(
    tiles: list[tuple[str, str]], target: dict[str, Any], at_once: int
) -> Iterator[dict[str, Any]]:
    """Compile each (tile file, package file) in a fork, `at_once` at a time; yields the answers."""
    waiting = list(tiles)
    running: dict[int, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            tile, package = waiting.pop(0)
            running[_fork(Path(tile), Path(package), target)] = (package, time.perf_counter())
        process, status = os.wait()
        if process in running:
            package, started = running.pop(process)
            error = _error_of(Path(package), os.waitstatus_to_exitcode(status))
            yield {
                "package": package,
                "error": error,
                "seconds": time.perf_counter() - started,
            }


def _warm_up() -> None:
    """Import what every tile needs, and do what each would do for the first time."""
    import gc

    gc.disable()  # compiling makes few cycles, so collecting only costs time
    os.nice(NICENESS)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes of its own
    from tqdm import tqdm  # type: ignore[import-untyped]

    from girih.graph.tiles.inductor import warm_up

    tqdm.monitor_interval = 0  # Inductor's progress bars would start a thread
    with contextlib.suppress(Exception):  # what is missing here, the first tile tells better
        warm_up()


def _fork(tile: Path, package: Path, target: dict[str, Any]) -> int:
    """Start compiling one tile; returns the process number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = _compile(tile, package, target)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _compile(tile: Path, package: Path, target: dict[str, Any]) -> int:
    from girih.graph.ir.tile_file import read_tile
    from girih.graph.tiles.inductor import compile_tile
    from girih.kernels.base.errors import GirihError
    from girih.kernels.base.target import Target

    try:
        compile_tile(read_tile(tile), package, Target(**target))
    except GirihError as error:
        _error_file(package).write_text(str(error))
        return 1
    return 0


def _error_of(package: Path, code: int) -> str | None:
    """Describe the error of a process that ended with `code`, or return None."""
    if code == 0:
        return None
    told = _error_file(package)
    if not told.exists():
        return (
            f"the compiling process ended with exit code {code} while building {package.name}; "
            "its messages are above (out of memory kills it with -9)"
        )
    text = told.read_text()
    told.unlink()
    return text


def _error_file(package: Path) -> Path:
    return package.with_suffix(".error")


def _say(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
