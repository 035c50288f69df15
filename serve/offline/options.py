"""Flat options of `LLM(...)` to the engine's configuration record."""

from __future__ import annotations

import dataclasses
import os
import typing
from typing import Any

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import unknown_name
from girih.kernels.base.records import to_record
from girih.passes.options import OptConfig
from girih.runtime.records.config import EngineConfig


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Build the engine's configuration from flat options.

    Raises:
        ConfigError: unknown option (with the nearest one), or a value it may not have.
    """
    where = option_names()
    opt = options.get("opt", "O2")
    sections: dict[str, dict[str, Any]] = {"model": {"source": _source(model)}}
    for name, value in options.items():
        if name == "opt":
            continue
        if name not in where:
            raise ConfigError(unknown_name("LLM", "option", name, sorted([*where, "opt"])))
        section, field = where[name]
        sections.setdefault(section, {})[field] = value
    level = opt if isinstance(opt, OptConfig) else _level(opt)
    return to_record(EngineConfig, {**sections, "opt": level})


def option_names() -> dict[str, tuple[str, str]]:
    """Return every flat option of `LLM` with the section and field it fills."""
    names: dict[str, tuple[str, str]] = {}
    for section, record in typing.get_type_hints(EngineConfig).items():
        if section == "opt":
            continue
        for field in dataclasses.fields(record):
            if field.name != "source":
                names[field.name] = (section, field.name)
    return names


def _level(name: str) -> OptConfig:
    from girih.conf.files import load_opt_level

    return load_opt_level(name)


def _source(model: Any) -> str:
    source = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(source, str):
        raise ConfigError(
            f"model is {model!r}; it must be text: a built-in name such as smollm2, a directory, a "
            ".gguf file, or a hub id"
        )
    return source
