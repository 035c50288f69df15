"""The files of a bundle and the key it is found by: names, checksums, use, removal.

Whoever runs a bundle holds a shared lock on its manifest, so that pruning keeps it: reading needs
no right to write, and a process that dies lets go of its locks.

What looks at bundles without running them (`girih cache`) needs nothing else: no torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from girih.kernels.base.errors import BundleError

MANIFEST = "manifest.json"
LIBRARY = "kernels.so"
PREPARED = "prepared.json"
"""Stands in a directory of what was built for another machine, in place of a manifest."""
BUNDLE_ADVICE = (
    "make it with `girih compile bundle=DIR`, or have it made here with bundle_missing=build"
)
"""Advice that ends an error about a named bundle that cannot be used."""
_REQUIRED = {"key.json", "program.json", "constants.safetensors", LIBRARY}


@dataclass(frozen=True)
class BundleKey:
    """Everything a bundle depends on, as an ordered list of (name, value)."""

    entries: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Hash of the entries: the bundle's name in the cache."""
        text = json.dumps(self.entries)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def differences(self, other: BundleKey) -> list[str]:
        """Entries in which `other` differs, as "name: mine → other's"."""
        mine, others = dict(self.entries), dict(other.entries)
        names = [*mine, *(n for n in others if n not in mine)]
        return [
            f"{n}: {mine.get(n, '(absent)')} → {others.get(n, '(absent)')}"
            for n in names
            if mine.get(n) != others.get(n)
        ]

    def as_text(self) -> str:
        """The digest and every entry."""
        return f"key {self.digest}\n" + "".join(f"  {n} = {v}\n" for n, v in self.entries)


def tile_package(path: Path, tile: str) -> Path:
    """Where a bundle keeps a compiled tile."""
    return path / "tiles" / f"{tile}.pt2"


def tile_graph(path: Path, tile: str) -> Path:
    """Where a bundle keeps a tile's graph."""
    return path / "tiles" / f"{tile}.json"


def read_key(path: Path) -> BundleKey | None:
    """The key of the bundle at `path`, or None when there is none that can be read."""
    try:
        entries = json.loads((path / "key.json").read_text())
        return BundleKey(tuple((str(n), str(v)) for n, v in entries))
    except (OSError, ValueError, TypeError):
        return None


def named_bundle(name: str) -> Path:
    """The directory that a user named.

    Raises:
        BundleError: no path can have this name.
    """
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise BundleError(f"bundle {name[:200]!r} cannot be looked at: {error}") from error


def require_bundle(name: str) -> None:
    """Refuse a named bundle that is not there, by a look at its manifest.

    Raises:
        BundleError: there is none, or as `named_bundle`.
    """
    path = named_bundle(name)
    if not os.path.isfile(path / MANIFEST):
        exists = os.path.exists(path)
        what = f"{path} holds no bundle" if exists else f"there is no bundle at {path}"
        raise BundleError(f"{what}; {BUNDLE_ADVICE}")


def remove_bundle(path: Path) -> None:
    """Delete a bundle; the manifest goes first, so that a half-deleted one is never trusted."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


class BundleHold:
    """A shared lock on a bundle: it is in use, and pruning keeps it.

    Given back by `release`, or when this object goes. Where the file system knows no locks there
    is none. While another process removes the bundle this waits, and finds it gone.

    Args:
        path: the bundle's directory.
    """

    def __init__(self, path: Path) -> None:
        self._close: weakref.finalize[[int], BundleHold] | None = None
        with contextlib.suppress(OSError):
            descriptor = os.open(path / MANIFEST, os.O_RDONLY)
            self._close = weakref.finalize(self, os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let the bundle be pruned; releasing twice is allowed."""
        if self._close is not None:
            self._close()


@contextlib.contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Try to lock a bundle exclusively for the `with` block; yield whether nobody else uses it."""
    file = path / MANIFEST
    try:
        # Network file systems want the right to write for this lock; others do not.
        descriptor = os.open(file, os.O_RDWR if os.access(file, os.W_OK) else os.O_RDONLY)
    except OSError:  # what is no bundle is in nobody's use
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except BlockingIOError:
        is_free = False
    except OSError:  # a file system without locks
        is_free = True
    try:
        yield is_free
    finally:
        os.close(descriptor)


def check_files(path: Path) -> None:
    """Hold every file of a bundle against its manifest.

    Raises:
        BundleError: a file is missing, truncated or altered; names the file.
    """
    try:
        sums = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle {path} has no readable {MANIFEST}: {error}") from error
    if not isinstance(sums, dict) or not _REQUIRED.issubset(sums):
        raise BundleError(f"bundle {path}: {MANIFEST} does not list {', '.join(sorted(_REQUIRED))}")
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"bundle {path} misses {name}")
        found = file_digest(file)
        if found != expected:
            raise BundleError(
                f"bundle file {file} is damaged: SHA-256 {found[:12]}…, expected {expected[:12]}…"
            )


def file_digest(path: Path) -> str:
    """SHA-256 of a file (hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
