"""Checks paths in settings before anything heavy is imported.

Looks at this machine only, reads little, and imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from girih.conf.compose import to_engine_config
from girih.graph.bundle.files import require_bundle
from girih.graph.files.sources import check_source
from girih.graph.files.spec import load_spec
from girih.kernels.base.errors import ConfigError, RequestError
from girih.runtime.records.config import EngineConfig
from girih.serve.text.texts import does_not


def engine_of(
    config: dict[str, Any], writes_bundle: bool = False, generates: bool = False
) -> EngineConfig:
    """Return the record of an engine whose model and paths can be what they are meant to be.

    Args:
        config: composed settings.
        writes_bundle: the bundle is to be made, so it need not be there.
        generates: the model must.

    Raises:
        ConfigError, SourceError, BundleError: they cannot.
        RequestError: the model embeds or classifies.
    """
    engine = to_engine_config(config)
    model = engine.model
    if check_source(model.source):
        spec = load_spec(model.source, model.dtype, task=model.task, pooling=model.pooling)
        if generates and spec.task != "generate":
            raise RequestError(does_not(("generate",), spec.task, spec.name))
    settings = engine.compile
    is_needed = settings.bundle_missing == "error" and not writes_bundle
    if settings.bundle and engine.opt.compile and is_needed:
        require_bundle(settings.bundle)
    require_writable("runtime.trace", engine.runtime.trace)
    if engine.opt.dump:
        make_folder("opt.dump", engine.opt.dump)
    return engine


def make_folder(key: str, name: str) -> Path:
    """Make a folder for what the work will write.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    path = Path(os.path.expanduser(name))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key} is {name}, which cannot be written: {error}") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{key} is {name}, which cannot be written: that is not allowed here")
    return path


def require_readable(key: str, file: str | None) -> None:
    """Refuse a file that is not there, or may not be read; None is fine.

    Raises:
        ConfigError: it cannot be read.
    """
    if file is None or (os.path.isfile(file) and os.access(file, os.R_OK)):
        return
    why = "there is no such file"
    if os.path.exists(file):
        why = "it is a folder" if os.path.isdir(file) else "that is not allowed here"
    raise ConfigError(f"{key} is {file}, which cannot be read: {why}")


def require_writable(key: str, file: str | None) -> None:
    """Refuse a file that could not be written when the work is done.

    Args:
        key: the setting that names it.
        file: its path; None is fine.

    Raises:
        ConfigError: it cannot be written, says why.
    """
    if file is None:
        return
    path = Path(os.path.expanduser(file))
    folder = path.parent
    if not os.path.isdir(folder):
        why = f"there is no folder {folder}"
    elif os.path.isdir(path):
        why = "it is a folder"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        why = "that is not allowed here"
    else:
        return
    raise ConfigError(f"{key} is {file}, which cannot be written: {why}")
