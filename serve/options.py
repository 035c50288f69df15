"""Flat options of `LLM(...)` to the engine's configuration record."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from typing import Any

from girih.kernels.errors import ConfigError
from girih.passes.options import OptConfig
from girih.runtime.config import EngineConfig


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """Build the engine's configuration from flat options.

    Raises:
        ConfigError: unknown option (with the nearest one), or a value it may not have.
    """
    opt = options.get("opt", "O2")
    sections: dict[str, dict[str, Any]] = {"model": {"source": model}}
    where = option_names()
    for name, value in options.items():
        if name == "opt":
            continue
        if name not in where:
            raise ConfigError(_unknown_option(name, [*where, "opt"]))
        section, field = where[name]
        sections.setdefault(section, {})[field] = value
    hints = typing.get_type_hints(EngineConfig)
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


def _unknown_option(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"LLM has no option '{name}'; {hint}Options: {', '.join(sorted(known))}"
