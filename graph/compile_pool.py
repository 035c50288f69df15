"""Compiles tiles in parallel processes, and builds the kernel library beside them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any

from girih.kernels.errors import CompileError
from girih.kernels.target import Target


class CompilePool:
    """Processes waiting for tiles to compile. Use as a context manager.

    Args:
        workers: processes to start, at least 1. They start at once and import torch while the
            caller traces.
    """

    def __init__(self, workers: int) -> None:
        self._processes = [self._start() for _ in range(max(1, workers))]
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if error:
                process.kill()
            _close(process.stdin)
        for process in self._processes:
            process.wait()
            _close(process.stdout)

    def compile(
        self,
        tiles: list[tuple[Path, Path]],
        target: Target,
        done: Callable[[Path, float], None],
    ) -> None:
        """Compile each (tile file, package file); calls `done(package, seconds)` for each.

        Raises:
            CompileError: a tile failed, or a process died.
        """
        with ThreadPoolExecutor(len(self._processes)) as threads:
            futures = {threads.submit(self._run, t, p, target): p for t, p in tiles}
            try:
                for future in as_completed(futures):
                    done(futures[future], future.result())
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for process in self._processes:
                    process.kill()  # ends the jobs that the other threads wait for
                raise

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "girih.graph.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _run(self, tile: Path, package: Path, target: Target) -> float:
        process = self._idle.get()
        try:
            answer = self._ask(process, tile, package, target)
        finally:
            self._idle.put(process)
        if answer["error"]:
            raise CompileError(answer["error"])
        seconds: float = answer["seconds"]
        return seconds

    @staticmethod
    def _ask(
        process: subprocess.Popen[str], tile: Path, package: Path, target: Target
    ) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None, "pipes were asked for"
        job = {"tile": str(tile), "package": str(package), "target": asdict(target)}
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            raise CompileError(
                f"the compiling process ended with exit code {code} while building "
                f"{package.name}; its messages are above (out of memory kills it with -9)"
            )
        result: dict[str, Any] = json.loads(line)
        return result


def _close(stream: IO[str] | None) -> None:
    """Close a pipe; a dead process may have left text in it that can no longer be written."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()
