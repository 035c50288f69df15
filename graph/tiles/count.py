"""Counts the tiles this process had compiled, and can forbid more.

Serving never compiles: tiles take any number of tokens, and a step outside their range is refused.
Tests hold engines to it with `COMPILES.forbidden()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from girih.kernels.base.errors import EngineError


class CompileCount:
    """A count that can be sealed."""

    def __init__(self) -> None:
        self.total = 0
        self._forbidden = False

    def note(self, tiles: int) -> None:
        """Count tiles about to be compiled.

        Raises:
            EngineError: compiling is forbidden now.
        """
        if self._forbidden:
            raise EngineError(
                f"{tiles} tiles were about to be compiled while the engine serves; compiled code "
                "takes every step it may be given, so this is a defect"
            )
        self.total += tiles

    @contextlib.contextmanager
    def forbidden(self) -> Iterator[None]:
        """Make compiling an error meanwhile."""
        self._forbidden = True
        try:
            yield
        finally:
            self._forbidden = False


COMPILES = CompileCount()
"""The count of this process."""
