"""Models that a start finds without a network: built-in ones, converted files, the hub's cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from girih.graph.files.fetch import builtin_names, builtin_path, download_bytes
from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.base.errors import SourceError
from girih.serve.cli.environment import size_of


@dataclass(frozen=True)
class LocalModel:
    """One model.

    Attributes:
        name: what `girih models rm` calls it; of built-in ones and the hub's also for `model=`.
        kind: "built-in", "hub", "converted" (config and tokenizer of a .gguf file) or "left over"
            (of another version of girih).
        path: its directory, or None when it would be fetched.
        num_bytes: on this disk, or to fetch.
    """

    name: str
    kind: str
    path: Path | None
    num_bytes: int


def local_models() -> list[LocalModel]:
    """Every built-in model, and what else is on this machine."""
    return [*_builtin(), *_left_over(), *_converted(), *_hub()]


def remove_model(name: str) -> LocalModel:
    """Remove a model's files; it can be fetched or converted again.

    Raises:
        SourceError: it is not there, or cannot be removed.
    """
    known = local_models()
    found = next((model for model in known if model.name == name), None)
    here = ", ".join(model.name for model in known if model.path is not None) or "none"
    if found is None or found.path is None:
        raise SourceError(f"there is no model {name!r} to remove; on this machine: {here}")
    try:
        if found.kind == "hub":
            _remove_from_hub(name)
        else:
            # A directory under its final name is complete.
            partial = found.path.rename(found.path.with_name(f".{found.path.name}-removed"))
            shutil.rmtree(partial)
    except OSError as error:
        raise SourceError(f"{found.path} cannot be removed: {error}") from error
    return found


def _builtin() -> Iterator[LocalModel]:
    for name in builtin_names():
        path = builtin_path(name)
        is_here = path.is_dir()
        size = size_of(path) if is_here else download_bytes(name)
        yield LocalModel(name, "built-in", path if is_here else None, size)


def _left_over() -> Iterator[LocalModel]:
    current = {builtin_path(name) for name in builtin_names()}
    for path in _directories(cache_dir() / "models"):
        if path not in current:
            yield LocalModel(path.name, "left over", path, size_of(path))


def _converted() -> Iterator[LocalModel]:
    for path in _directories(cache_dir() / "gguf"):
        yield LocalModel(path.name, "converted", path, size_of(path))


def _directories(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _hub() -> Iterator[LocalModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.size_on_disk:
            yield LocalModel(repo.repo_id, "hub", Path(repo.repo_path), repo.size_on_disk)


def _remove_from_hub(name: str) -> None:
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir()
    (repo,) = (r for r in cache.repos if r.repo_type == "model" and r.repo_id == name)
    cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
