"""Optimisation levels for Python callers: reads `opt/*.yaml` without Hydra.

Hydra keeps process-wide state that belongs to the host application, so `LLM(opt="O2")` must not
touch it. The YAML files stay the only definition of a level.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from girih.kernels.errors import ConfigError
from girih.passes.options import OptConfig, PassesConfig, PassOptions


def opt_level_names() -> list[str]:
    """Return the names of all optimisation levels."""
    folder = resources.files("girih.conf").joinpath("opt")
    return sorted(e.name.removesuffix(".yaml") for e in folder.iterdir() if ".yaml" in e.name)


def load_opt_level(name: str) -> OptConfig:
    """Return the switches of optimisation level `name`.

    Raises:
        ConfigError: no such level.
    """
    names = opt_level_names()
    if name not in names:
        raise ConfigError(f"unknown optimisation level opt='{name}'; allowed: {', '.join(names)}")
    values = _merged(name)
    passes = {key: PassOptions(**options) for key, options in values.pop("passes", {}).items()}
    return OptConfig(**values, passes=PassesConfig(**passes))


def _merged(name: str) -> dict[str, Any]:
    """Merge a level's file over the level it inherits from (`defaults: [PARENT, _self_]`)."""
    text = resources.files("girih.conf").joinpath("opt", f"{name}.yaml").read_text("utf-8")
    own: dict[str, Any] = yaml.safe_load(text)
    merged: dict[str, Any] = {}
    for parent in own.pop("defaults", []):
        if parent != "_self_":
            merged |= _merged(parent)
    passes = {**merged.get("passes", {}), **own.get("passes", {})}
    return {**merged, **own, "passes": passes}
