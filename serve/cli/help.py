"""The help screens, written from the schemas so that they cannot go out of date."""

from __future__ import annotations

import textwrap
from typing import Any

from girih.conf import schema
from girih.conf.files import default_settings, group_options
from girih.serve.cli.verbs import VERBS, Verb

WIDTH = 98
FLAGS = (
    "flags: -q no progress   --debug tracebacks   --cfg print the settings   --help-all every key"
)


def family_screen(verbs: list[Verb]) -> str:
    """Return the help of the verbs that share a first word."""
    lines = [f"  girih {verb.name:<15} {verb.summary}" for verb in verbs]
    return "\n".join([*lines, "", "`--help` after any of them lists its settings."])


def overview() -> str:
    """Return the screen of `girih` alone."""
    lines = [
        "girih compiles an unmodified Hugging Face model into a few tiles and serves it.",
        "",
        "usage: girih VERB [key=value ...] [flags]",
        "",
        *(f"  {verb.name:<15} {verb.summary}" for verb in VERBS.values()),
        "",
        "Try:",
        '  girih generate prompt="The capital of France is"',
        "  girih serve smollm2 port=8000",
        "",
        "Settings are key=value; a group such as model, opt or sampling takes one of its options",
        "(opt=O0) and its keys can be set one by one (scheduler.max_num_seqs=16).",
        "`girih help VERB` lists a verb's settings, `girih version` the version.",
    ]
    return "\n".join(lines)


def verb_screen(verb: Verb, full: bool = False) -> str:
    """Return the help of one verb.

    Args:
        verb: whose help.
        full: every key with its description instead of one screen.
    """
    config = default_settings(verb.name)
    lines = [
        f"girih {verb.name}: {verb.summary}",
        "",
        *(f"  {example}" for example in verb.examples),
        "",
    ]
    lines += _own_keys(verb.name, config)
    lines += _aliases(verb.name)
    lines += _groups(verb.name)
    sections = schema.VERBS[verb.name].sections
    for section in sections:
        lines += _section(section, config[section], full)
    lines += ["", FLAGS]
    return "\n".join(lines)


def _own_keys(verb: str, config: dict[str, Any]) -> list[str]:
    notes = schema.describe(schema.VERBS[verb].keys)
    lines: list[str] = []
    for name, note in notes.items():
        lines += textwrap.wrap(
            f"  {name}={_show(config[name])}".ljust(22) + " " + note,
            WIDTH,
            subsequent_indent=" " * 23,
        )
    return [*lines, ""] if lines else []


def _aliases(verb: str) -> list[str]:
    leaves = schema.leaf_types(verb)
    known = [name for name, key in schema.ALIASES.items() if key in leaves]
    if not known:
        return []
    return _wrap("short names: ", known, " ")


def _groups(verb: str) -> list[str]:
    named = [name for name in schema.VERBS[verb].sections if name in schema.GROUPS]
    parts = [
        f"{name}={'|'.join(option for option in group_options(name) if option != 'custom')}"
        + ("|DIR|FILE.gguf|HUB_ID" if name == "model" else "")
        for name in named
    ]
    return _wrap("groups: ", parts, "  ")


def _section(section: str, values: dict[str, Any], full: bool) -> list[str]:
    flat = dict(_flatten(values, f"{section}."))
    if not full:
        parts = [
            f"{schema.LABELS.get(key, key.removeprefix(section))}={_show(value)}"
            for key, value in flat.items()
        ]
        return _wrap(f"{section}: ", parts, "  ")
    notes = schema.describe(schema.SECTIONS[section])
    lines = [""]
    for key, value in flat.items():
        note = notes.get(key.split(".")[1], "")
        lines += textwrap.wrap(
            f"{schema.LABELS.get(key, key)}={_show(value)}".ljust(43) + " " + note,
            WIDTH,
            subsequent_indent=" " * 44,
        )
    return lines


def _flatten(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _wrap(head: str, parts: list[str], joint: str) -> list[str]:
    lines, line = [], head
    for index, part in enumerate(parts):
        piece = part if index == len(parts) - 1 else part + joint
        if len(line) + len(piece.rstrip()) > WIDTH:
            lines.append(line.rstrip())
            line = "    "
        line += piece
    return [*lines, line.rstrip()]


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(str(item) for item in value)}]"
    return str(value)
