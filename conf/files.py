"""Reads the YAML files without Hydra: for help screens (instant) and for Python callers.

Hydra keeps process-wide state that belongs to the host application, so `LLM(opt="O2")` must not
touch it. The YAML files stay the only definition; a test holds this reading against Hydra's.
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any

import yaml

from girih.conf import schema
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import did_you_mean
from girih.kernels.base.records import to_record
from girih.passes.options import OptConfig


def group_options(group: str) -> list[str]:
    """Return the options of a configuration group, e.g. ["O0", "O2"] for "opt"."""
    folder = resources.files("girih.conf").joinpath(group)
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_opt_level(name: str) -> OptConfig:
    """Return the switches of optimisation level `name`.

    Raises:
        ConfigError: no such level.
    """
    require_option("opt", name)
    return to_record(OptConfig, read_option("opt", name), "opt")


def require_option(group: str, value: str) -> None:
    """Check that a group has an option, of those that are chosen by name.

    Raises:
        ConfigError: it has not; names the nearest one.
    """
    names = [name for name in group_options(group) if name != "custom"]
    if value in names:
        return
    hint = did_you_mean(str(value), names, cutoff=0.6 if group == "model" else 0.4)
    more = ", or a directory, a .gguf file or a hub id" if group == "model" else ""
    raise ConfigError(f"unknown option {group}={value!r}; {hint}Allowed: {', '.join(names)}{more}")


def default_settings(verb: str) -> dict[str, Any]:
    """Return the settings of `verb` when the user sets nothing."""
    settings: dict[str, Any] = dataclasses.asdict(schema.root_schema(verb)())
    own = _read(f"{schema.root_name(verb)}.yaml")
    for entry in own.pop("defaults"):
        if isinstance(entry, dict):
            for group, option in entry.items():
                settings[group] = _merge(settings[group], read_option(group, option))
    return _merge(settings, own)


def read_option(group: str, name: str) -> dict[str, Any]:
    """Return a group option merged over those it inherits from (`defaults: [PARENT, _self_]`)."""
    own = _read(group, f"{name}.yaml")
    merged: dict[str, Any] = {}
    for parent in own.pop("defaults", []):
        if parent != "_self_":
            merged = _merge(merged, read_option(group, parent))
    return _merge(merged, own)


def _read(*path: str) -> dict[str, Any]:
    text = resources.files("girih.conf").joinpath(*path).read_text("utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
