"""The directory of cached bundles: what is in it, what made a miss, and keeping it within a size.

Every bundle is a directory named by its key's digest; its manifest's modification time says when it
was last used. Bundles of several girih versions live side by side, since the version is in the key.
What `girih compile` prepared for a machine that is not here ("KEY.prepared") lies among them: it
takes room and is pruned like them, and is nothing that a start could find.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from girih.graph.bundle.files import (
    LIBRARY,
    MANIFEST,
    PREPARED,
    BundleKey,
    check_files,
    file_digest,
    read_key,
    remove_bundle,
    unused,
)
from girih.kernels.base.errors import BundleError

ABANDONED_SECONDS = 3600.0
"""Age from which the working directory of a build that nobody holds the lock of is rubbish."""


@dataclass(frozen=True)
class CachedBundle:
    """One bundle of the cache.

    Attributes:
        path: its directory.
        key: what it was built from.
        model: name of the model it was built for (a fine-tune may use it too).
        num_bytes: size on disk.
        built, used: seconds since the epoch.
        is_prepared: graphs for another machine, without code.
    """

    path: Path
    key: BundleKey
    model: str
    num_bytes: int
    built: float
    used: float
    is_prepared: bool = False

    def entry(self, name: str) -> str:
        """A named entry of the key, "" when the bundle's version does not have it."""
        return dict(self.key.entries).get(name, "")


def list_bundles(directory: Path, prepared: bool = False) -> list[CachedBundle]:
    """Every bundle whose key can be read, the one used last first.

    Args:
        directory: the cache.
        prepared: list what was prepared for other machines too.
    """
    found = []
    for path in sorted(directory.glob("*")) if directory.is_dir() else []:
        with contextlib.suppress(OSError):  # another process removes it meanwhile
            bundle = None if path.name.startswith(".") else _described(path, prepared)
            if bundle is not None:
                found.append(bundle)
    return sorted(found, key=lambda bundle: -bundle.used)


def _described(path: Path, prepared: bool) -> CachedBundle | None:
    """The bundle at `path`, or None when there is none."""
    key = read_key(path)
    marks = [path / MANIFEST, *([path / PREPARED] if prepared else [])]
    mark = next((m for m in marks if m.exists()), None)
    if key is None or mark is None:
        return None
    times = (path / "key.json").stat().st_mtime, mark.stat().st_mtime
    is_prepared = mark.name == PREPARED
    model = _model(path / (PREPARED if is_prepared else "program.json"))
    return CachedBundle(path, key, model, _size(path), *times, is_prepared)


def mark_used(path: Path) -> None:
    """Note that a bundle was used now; a cache that cannot be written keeps no such notes."""
    with contextlib.suppress(OSError):
        (path / MANIFEST).touch()


def nearest_bundle(directory: Path, key: BundleKey) -> CachedBundle | None:
    """The bundle whose key differs from `key` in the fewest entries."""
    bundles = list_bundles(directory)
    return min(bundles, key=lambda bundle: len(bundle.key.differences(key)), default=None)


# Entries of a key that decide the kernel library; the model has no say in it.
_LIBRARY_ENTRIES = (
    "target.device", "target.isa", "target.arch", "target.compiler", "torch", "girih.kernels",
)  # fmt: skip


def copy_library(directory: Path, key: BundleKey, path: Path) -> Path | None:
    """Copy to `path` the kernel library of a bundle that was built from the same entries.

    The copy is held against the other bundle's checksum, so that one which is damaged, or removed
    meanwhile, gives nothing. The bundles stay independent of each other.

    Args:
        directory: the cache.
        key: of the bundle that needs the library.
        path: file to write, in an existing directory; left alone when there is none to copy.

    Returns:
        The bundle it was taken from, or None.
    """
    wanted = _library_entries(key)
    for manifest in sorted(directory.glob(f"*/{MANIFEST}")):
        bundle = manifest.parent
        found = None if bundle.name.startswith(".") else read_key(bundle)
        if found is not None and _library_entries(found) == wanted and _copied(bundle, path):
            return bundle
    return None


def _library_entries(key: BundleKey) -> list[str | None]:
    entries = dict(key.entries)
    return [entries.get(name) for name in _LIBRARY_ENTRIES]


def _copied(bundle: Path, path: Path) -> bool:
    """Copy the library of a bundle; return whether it could be copied whole."""
    copy = path.with_name(f".{path.name}.copy")
    try:
        expected = json.loads((bundle / MANIFEST).read_text())[LIBRARY]
        shutil.copy(bundle / LIBRARY, copy)
        if file_digest(copy) != expected:
            return False
        copy.rename(path)
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finally:
        with contextlib.suppress(OSError):
            copy.unlink(missing_ok=True)


def prune(directory: Path, max_bytes: int, keep: Path | None = None) -> list[CachedBundle]:
    """Remove bundles, the one used longest ago first, until the others fit into `max_bytes`.

    What another process is building or an engine runs is left alone, and so is `keep`; rubbish of
    builds that were killed goes too.

    Returns:
        The bundles that were removed.
    """
    remove_abandoned(directory)
    bundles = list_bundles(directory, prepared=True)
    total = sum(b.num_bytes for b in bundles)
    removed = []
    for bundle in reversed(bundles):
        if total <= max_bytes:
            break
        if bundle.path != keep and _remove(bundle.path):
            total -= bundle.num_bytes
            removed.append(bundle)
    return removed


def is_in_use(bundle: CachedBundle) -> bool:
    """Return whether an engine runs a bundle."""
    with unused(bundle.path) as free:
        return not free


def verify(directory: Path) -> list[tuple[CachedBundle, str | None]]:
    """Read every file of every bundle; gives what is wrong with each, or None."""
    return [(bundle, _fault(bundle.path)) for bundle in list_bundles(directory)]


def remove_abandoned(directory: Path) -> list[Path]:
    """Remove working directories (".KEY-xxxx") that killed builds left behind."""
    removed = []
    for path in directory.glob(".*-*") if directory.is_dir() else []:
        key = path.name[1:].rpartition("-")[0]
        if _age(path) > ABANDONED_SECONDS:
            with _try_lock(directory / key) as free:
                if free:
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
    return removed


def _age(directory: Path) -> float:
    """Seconds since a directory was changed; 0 for what is none, or went meanwhile."""
    try:
        return time.time() - directory.stat().st_mtime if directory.is_dir() else 0.0
    except OSError:
        return 0.0


def _remove(path: Path) -> bool:
    """Remove a bundle; return whether it could be removed."""
    with _try_lock(path) as free, unused(path) as is_unused:
        if not (free and is_unused):
            return False
        with contextlib.suppress(OSError):  # another user's
            remove_bundle(path)
        return not path.exists()


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Try to take the build lock of a bundle for the `with` block; yield whether it is held."""
    lock = FileLock(path.parent / f".{path.name}.lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _fault(path: Path) -> str | None:
    try:
        check_files(path)
    except BundleError as error:
        return str(error)
    return None


def _model(description: Path) -> str:
    try:
        return str(json.loads(description.read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return "?"


def _size(path: Path) -> int:
    """Bytes of a directory; what vanishes meanwhile has none."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
    return size
