"""An executable's memory: dropped for sleep, loaded again, exchanged for other weights.

On the CPU weights are in host memory already, so there is nowhere to move them that would free
any: they are dropped, and read again from the model's files. New weights are loaded and checked
beside the old ones, so for a moment both are in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from girih.graph.execute.executable import Executable, return_freed_memory
from girih.graph.files.spec import ModelSpec
from girih.graph.tiles.inductor import TileFn
from girih.kernels.base.errors import ConfigError, RequestError, SourceError
from girih.kernels.base.garbage import collect

Weights = dict[str, torch.Tensor]


class Resident:
    """The memory of one executable.

    Args:
        executable: whose.
        spec: the model whose weights it has.
        read_spec: reads what the model at a source is.
        read: loads the weights of a model, in their planned form.
        load_tiles: loads the tiles anew.
        require_built: raises BusyError while tiles are being compiled.
        check: the canary with given weights, on the executable; returns how it went.
        threads: compute threads.
    """

    def __init__(
        self,
        executable: Executable,
        spec: ModelSpec,
        read_spec: Callable[[str], ModelSpec],
        read: Callable[[ModelSpec], Weights],
        load_tiles: Callable[[], dict[str, TileFn]],
        require_built: Callable[[], None],
        check: Callable[[Weights], str],
        threads: int,
    ) -> None:
        self._executable = executable
        self._spec = spec
        self._read_spec = read_spec
        self._read = read
        self._threads = threads
        self._load_tiles = load_tiles
        self._require_built = require_built
        self._check = check
        self._has_tiles = True

    def drop(self, level: int) -> None:
        """Give up weights and KV cache; compiled code as well at level 2."""
        self._require_built()
        collect()  # before malloc returns pages: cycles may hold tensors
        self._executable.release(with_tiles=level > 1)
        self._has_tiles = self._has_tiles and level == 1

    def load(self) -> None:
        """Take back what was given up, and run the canary."""
        torch.set_num_threads(self._threads)
        weights = self._read(self._spec)
        tiles = None if self._has_tiles else self._load_tiles()
        self._executable.restore(weights, tiles)
        self._has_tiles = True
        self._check(weights)

    def exchange(self, source: str | None) -> str:
        """Load other weights of the same model.

        Args:
            source: a model source; None reads the present files again.

        Returns:
            How it went.

        Raises:
            RequestError: they are of another model, or cannot be read.
            BundleError: the canary fails with them. The old ones serve on, whatever was raised.
        """
        self._require_built()
        torch.set_num_threads(self._threads)
        spec = self._spec if source is None else self._same_model(source)
        try:
            fresh = self._read(spec)
        except SourceError as error:
            raise RequestError(f"the weights cannot be used: {error}", "path") from error
        old = self._executable.weights()
        self._executable.set_weights(fresh)
        try:
            note = self._check(fresh)
        except BaseException:
            self._executable.set_weights(old)
            raise
        self._spec = spec
        del old
        return_freed_memory()
        return f"{spec.name}; {note}"

    def _same_model(self, source: str) -> ModelSpec:
        """The spec of `source`, which must compute what this engine was built for."""
        try:
            spec = self._read_spec(source)
        except (SourceError, ConfigError) as error:
            raise RequestError(f"path: {error}", "path") from error
        mine, theirs = dict(self._spec.key_entries()), dict(spec.key_entries())
        names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
        if names:
            differences = "; ".join(
                f"{n}: {mine.get(n, '(absent)')} → {theirs.get(n, '(absent)')}" for n in names[:4]
            )
            raise RequestError(
                f"path names another model than the one that is served: {differences}. Start an "
                "engine of its own for it",
                "path",
            )
        return spec


class ResidentRunner:
    """A runner whose memory is a `Resident`, which is set after it is made (a `MemoryRunner`)."""

    resident: Resident

    def sleep(self, level: int) -> None:
        """See `MemoryRunner.sleep`."""
        self.resident.drop(level)

    def wake(self) -> None:
        """See `MemoryRunner.wake`."""
        self.resident.load()

    def reload_weights(self, path: str | None) -> str:
        """See `MemoryRunner.reload_weights`."""
        return self.resident.exchange(path)
