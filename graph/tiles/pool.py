"""Compiles tiles in parallel processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from girih.graph.tiles.count import COMPILES
from girih.kernels.base.errors import CompileError
from girih.kernels.base.target import Target


class CompilePool:
    """Compiles tiles, several at once, in processes of its own. Use as a context manager.

    The first process starts at once and imports torch while the caller traces; it forks one for
    each tile (see `girih.graph.tiles.worker`).

    Args:
        at_once: tiles to compile at the same time, at least 1.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = max(1, at_once)
        self._worker = self._start()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        if error:
            self.kill()
        _close(self._worker.stdin)
        self._worker.wait()
        _close(self._worker.stdout)

    def compile(
        self,
        tiles: list[tuple[Path, Path]],
        target: Target,
        done: Callable[[Path, float], None],
    ) -> None:
        """Compile each (tile file, package file); calls `done(package, seconds)` for each.

        Raises:
            CompileError: a tile failed, or a process died; the others are ended.
        """
        COMPILES.note(len(tiles))
        try:
            self._request(tiles, target)
            for _ in tiles:
                self._receive(done)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and all it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker.pid, signal.SIGKILL)

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "girih.graph.tiles.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, so that its forks end with it
        )

    def _request(self, tiles: list[tuple[Path, Path]], target: Target) -> None:
        assert self._worker.stdin is not None, "a pipe was asked for"
        request = {
            "tiles": [[str(tile), str(package)] for tile, package in tiles],
            "target": asdict(target),
            "at_once": self.at_once,
        }
        with contextlib.suppress(BrokenPipeError):  # its end shows when the answer is read
            self._worker.stdin.write(json.dumps(request) + "\n")
            self._worker.stdin.flush()

    def _receive(self, done: Callable[[Path, float], None]) -> None:
        assert self._worker.stdout is not None, "a pipe was asked for"
        line = self._worker.stdout.readline()
        if not line:
            raise CompileError(
                f"the process that compiles tiles ended with exit code {self._worker.wait()}; "
                "its messages are above (out of memory kills it with -9)"
            )
        answer = json.loads(line)
        if answer["error"]:
            raise CompileError(answer["error"])
        done(Path(answer["package"]), answer["seconds"])


def _close(stream: IO[str] | None) -> None:
    """Close a pipe; a dead process may have left text in it that can no longer be written."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()
