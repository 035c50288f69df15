"""Where girih keeps what it fetched, converted or compiled: the only reader of GIRIH_CACHE_DIR."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def cache_dir() -> Path:
    """Root of the user's cache (it may not exist yet).

    `$GIRIH_CACHE_DIR`, else `$XDG_CACHE_HOME/girih`, else `~/.cache/girih`.
    """
    own = os.environ.get("GIRIH_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "girih"


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a directory that is to be made, so that one process makes it.

    Args:
        path: the directory; its parent is made.
        on_wait: called when another process holds the lock.

    Raises:
        OSError: nothing can be written beside `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass  # where no file can be made, waiting for a lock would have no end
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
