"""Flat options of `LLM(...)` to the engine's configuration record."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from typing import Any

import msgspec

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import unknown_name
from girih.passes.options import OptConfig
from girih.runtime.records.config import EngineConfig

_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_MANY = {int: "integers", str: "texts"}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Build the engine's configuration from flat options.

    Raises:
        ConfigError: unknown option (with the nearest one), or a value it may not have.
    """
    opt = options.get("opt", "O2")
    sections: dict[str, dict[str, Any]] = {"model": {"source": _source(model)}}
    where = option_names()
    hints = typing.get_type_hints(EngineConfig)
    for name, value in options.items():
        if name == "opt":
            continue
        if name not in where:
            raise ConfigError(unknown_name("LLM", "option", name, sorted([*where, "opt"])))
        section, field = where[name]
        hint = typing.get_type_hints(hints[section])[field]
        sections.setdefault(section, {})[field] = _typed(f"{section}.{field}", value, hint)
    records: dict[str, Any] = {
        name: record(**sections.get(name, {})) for name, record in hints.items() if name != "opt"
    }
    return EngineConfig(**records, opt=opt if isinstance(opt, OptConfig) else _level(opt))


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


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A value as its field keeps it: paths as text, lists as tuples.

    Raises:
        ConfigError: it is of another type.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} is {value!r}; it must be {_in_words(kind)}") from None


def _in_words(kind: Any) -> str:
    """A field's type for people, e.g. "an integer, text or None"."""
    if not isinstance(kind, types.UnionType):
        entries = typing.get_args(kind)
        return f"a list of {_MANY[entries[0]]}" if entries else _WORDS[kind]
    words = ["None" if k is types.NoneType else _in_words(k) for k in typing.get_args(kind)]
    return f"{', '.join(words[:-1])} or {words[-1]}"
