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

from girih.kernels.base.errors import ConfigError

PREFIX = "girih-core-"
LOCK = "lock"
SOCKET = "core"
MAX_SOCKET_PATH = 107  # bytes, unix(7)


class SocketFolder:
    """Makes the folder, and removes those that dead processes left behind.

    Attributes:
        path: the folder; only this user may enter it.
        socket: where the core's socket is to be, in it.

    Raises:
        ConfigError: a socket in it would have too long a path.
    """

    def __init__(self) -> None:
        remove_dead_folders()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.socket = self.path / SOCKET
        size = len(os.fsencode(self.socket))
        if size > MAX_SOCKET_PATH:
            self.path.rmdir()
            raise ConfigError(
                f"the engine's socket {self.socket} has a path of {size} bytes; the system "
                f"allows {MAX_SOCKET_PATH}: set TMPDIR to a folder with a shorter path"
            )
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
