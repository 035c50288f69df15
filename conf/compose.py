"""From `key=value` words to a checked configuration (the only user of Hydra's compose API).

    words ─ split ─▶ aliases, key check ─▶ group choices + typed overrides ─▶ Hydra ─▶ plain dict
                          │                                                     ▲
                          └── text values (prompts, paths) bypass Hydra's grammar ─┘

Text values are taken literally, so that `prompt="a, b = ${c}"` needs no second quoting.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from girih.conf import schema
from girih.conf.files import group_options, require_option
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import nearest
from girih.kernels.base.records import to_record
from girih.runtime.records.config import EngineConfig

Texts = dict[str, str | list[str] | None]
_BOOLEANS = {
    **dict.fromkeys(("yes", "y", "on", "1"), "true"),
    **dict.fromkeys(("no", "n", "off", "0"), "false"),
}


def compose_config(verb: str, words: list[str]) -> dict[str, Any]:
    """Compose the configuration of `verb` from its YAML and the user's `key=value` words.

    Raises:
        ConfigError: unknown key or option (with the nearest one), or a value of the wrong type.
    """
    overrides, texts, lists = _split_words(verb, words)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("girih.conf", version_base="1.3"):
            composed = compose(schema.root_name(verb), overrides=overrides)
        texts |= {key: [str(item) for item in OmegaConf.select(composed, key)] for key in lists}
        config = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    for key, value in texts.items():
        _assign(config, key, value)
    return dataclasses.asdict(to_record(schema.root_schema(verb), config))


def to_engine_config(config: dict[str, Any]) -> EngineConfig:
    """Return the frozen record the runtime is built from."""
    return to_record(EngineConfig, {name: config[name] for name in schema.ENGINE_SECTIONS})


def unknown_key_message(key: str, known: typing.Iterable[str]) -> str:
    """Say that `key` is unknown and name the nearest known one."""
    known = list(known)
    parent, _, leaf = key.rpartition(".")
    ends = [name for name in known if name.rpartition(".")[2] == key]
    if len(ends) == 1:
        return f"unknown key '{key}'; did you mean '{ends[0]}'?"
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    hit = nearest(leaf, [name.rpartition(".")[2] for name in siblings])
    suggestion = f"{parent}.{hit}" if hit and parent else hit
    if suggestion is None and len(siblings) > 1 and parent.count(".") == 1:
        names = ", ".join(sorted(name.rpartition(".")[2] for name in siblings))
        return f"unknown key '{key}'; {parent} has {names}"
    suggestion = suggestion or nearest(key, known)
    if suggestion is None and parent:
        section = nearest(key.split(".")[0], {name.split(".")[0] for name in known})
        suggestion = f"{section}.…" if section else None
    hint = f"; did you mean '{suggestion}'?" if suggestion else ""
    return f"unknown key '{key}'{hint}"


def _split_words(verb: str, words: list[str]) -> tuple[list[str], Texts, list[str]]:
    """Return what Hydra is told, texts it does not see, and keys of lists of texts."""
    leaves = schema.leaf_types(verb)
    sections = schema.VERBS[verb].sections
    overrides: list[str] = []
    texts: Texts = {}
    lists: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                f"'{word}' is not a setting; settings are written key=value, "
                f"and `girih {verb} --help` lists them"
            )
        target = schema.ALIASES.get(key, key)
        if f"{target}.enabled" in leaves:  # opt.passes.NAME=false
            target += ".enabled"
        if key in schema.LABELS and schema.LABELS[key] in sections:
            raise ConfigError(f"{key} is only a name; write {schema.LABELS[key]}={value}")
        if key in sections and key in schema.GROUPS:
            overrides += _choose_option(key, value, texts)
        elif target not in leaves:
            short = [k.removesuffix(".enabled") for k in leaves if k.endswith(".enabled")]
            raise ConfigError(
                f"{unknown_key_message(key, [*schema.key_names(verb), *short, *sections])} "
                f"(`girih {verb} --help` lists all)"
            )
        elif _takes_text(leaves[target], value):
            texts[target] = _text_value(leaves[target], value)
        else:
            overrides.append(f"++{target}={_plain_value(leaves[target], value)}")
            lists += [target] if leaves[target] == tuple[str, ...] else []
    return overrides, texts, lists


def _choose_option(group: str, value: str, texts: Texts) -> list[str]:
    options = group_options(group)
    is_option = value in options and value != "custom"
    if group == "model" and not is_option and _is_source(value, nearest(value, options)):
        texts["model.source"] = value
        return ["model=custom"]
    require_option(group, value)
    return [f"{group}={value}"]


def _is_source(value: str, close: str | None) -> bool:
    if not value or value == "custom":
        return False
    looks_like_path = "/" in value or value.endswith(".gguf") or Path(value).exists()
    return looks_like_path or close is None


def _takes_text(kind: Any, value: str) -> bool:
    if kind in (str, str | None):
        return True
    return kind == tuple[str, ...] and not value.strip().startswith("[")


def _text_value(kind: Any, value: str) -> str | list[str] | None:
    if kind == tuple[str, ...]:
        return [value]
    return None if kind == (str | None) and value in ("null", "None") else value


def _plain_value(kind: Any, value: str) -> str:
    if kind in (bool, bool | None):
        return _BOOLEANS.get(value.lower(), value)
    return "null" if value == "None" else value


def _assign(config: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    node = config
    for part in path:
        node = node.setdefault(part, {})
    node[leaf] = value


def _explain(error: Exception) -> str:
    """Turn Hydra's message into one line that names the key."""
    if isinstance(error, OverrideParseException):
        word = error.override.removeprefix("++")
        return (
            f"cannot read '{word}'; a list is written [a,b], and the shell wants quotes "
            "around it: 'key=[a,b]'"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).replace("'++", "'")  # how settings are handed to Hydra
    first = text.splitlines()[0] if text else type(cause).__name__
    key = re.search(r"full_key: (\S+)", text)
    return f"{key.group(1)}: {first}" if key else first
