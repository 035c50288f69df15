"""Which verb the first words of a command line name, and what is said when they name none."""

from __future__ import annotations

import shlex

from girih.conf.files import group_options
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import nearest
from girih.serve.cli.verbs import VERBS, Verb

MEANT = {
    "api": "serve",
    "benchmark": "bench serve",
    "build": "compile",
    "cache clean": "cache prune",
    "cache clear": "cache prune",
    "cache ls": "cache list",
    "cache rm": "cache prune",
    "complete": "generate",
    "config": "serve --cfg",
    "download": "fetch",
    "get": "fetch",
    "info": "env",
    "install": "fetch",
    "launch": "serve",
    "ls": "models",
    "list": "models",
    "models list": "models",
    "models ls": "models",
    "model": "models",
    "models remove": "models rm",
    "models delete": "models rm",
    "pull": "fetch",
    "remove": "models rm",
    "rm": "models rm",
    "run": "chat",
    "server": "serve",
    "show": "explain",
    "start": "serve",
    "status": "env",
}
"""Verbs of other tools, and what does the same here."""


def find_verb(words: list[str]) -> tuple[Verb, list[str]]:
    """Return the verb, of one word or two, and the words after it.

    Raises:
        ConfigError: there is none; names the nearest one.
    """
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in VERBS:
            return VERBS[name], words[count:]
        if count == 2 and name in MEANT:
            break
    raise ConfigError(_unknown(words))


def family_of(word: str) -> list[Verb]:
    """Return the verbs of two words that begin with `word`, unless it is one by itself."""
    if word in VERBS:
        return []
    return [verb for name, verb in VERBS.items() if name.startswith(f"{word} ")]


def _unknown(words: list[str]) -> str:
    first = words[0]
    family = family_of(first)
    meant = None if family and len(words) == 1 else _meant(words)
    if family:
        seen = f", not '{words[1]}'" if len(words) > 1 else ""
        allowed = " or ".join(f"`girih {verb.name}`" for verb in family)
        hint = f"; did you mean `girih {meant}`?" if meant else ""
        return f"`girih {first}` needs a second word: {allowed}{seen}{hint}"
    if meant is None and (first.startswith("-") or any(mark in first for mark in "=/.:")):
        example = "serve" if first.startswith("-") else f"serve {first}"
        return f"'{first}' is no verb; one comes first: `girih {example}` (`girih help` lists them)"
    hint = f"did you mean `girih {meant}`? " if meant else ""
    pair = " ".join(words[:2])
    return f"unknown verb '{pair if pair in MEANT else first}'; {hint}`girih help` lists the verbs"


def _meant(words: list[str]) -> str | None:
    """The line that somebody meant who wrote an unknown verb."""
    for count in (2, 1):
        named = MEANT.get(" ".join(words[:count]))
        if named is not None:
            return shlex.join([*named.split(), *words[count:]])
    if words[0] == "girih":
        return shlex.join(words[1:])
    if words[0] in group_options("model"):
        return shlex.join(["serve", *words])
    for count in (2, 1):
        close = nearest(" ".join(words[:count]), VERBS, cutoff=0.7)
        if close is not None:
            return shlex.join([*close.split(), *words[close.count(" ") + 1 :]])
    return None
