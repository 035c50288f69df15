"""A private folder for a core's socket, removed with its owner or by whoever starts next.

Its owner holds a lock on a file in it. The system drops the lock when the owner ends, however that
happens, so a folder whose lock can be had belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "girih-core-"
LOCK = "lock"


class SocketFolder:
    """Makes the folder, and removes those that dead processes left behind.

    Attributes:
        path: the folder; only this user may enter it.
    """

    def __init__(self) -> None:
        remove_dead_folders()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        starting = self.path / "starting"  # nobody else looks at it before it is locked
        self._lock = os.open(starting, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        starting.rename(self.path / LOCK)

    def remove(self) -> None:
        """Remove the folder; doing so twice does no harm."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_dead_folders() -> None:
    """Remove this user's folders whose owner is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just being made
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
