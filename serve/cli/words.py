"""Translates other tools' habits into settings: `--port 8000`, `smollm2`, `port = 8000`.

A word whose meaning is certain becomes a setting; for any other the error has the words to write.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from girih.conf import schema
from girih.conf.files import group_options
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import nearest
from girih.serve.cli.flags import FLAGS

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "a": ("serve.model_names",),
    "alias": ("serve.model_names",),
    "api_key": ("serve.api_keys",),
    "c": ("max_model_len",),
    "context_length": ("max_model_len",),
    "ctx_size": ("max_model_len",),
    "f": ("input",),
    "gpu_memory_utilization": ("cache.memory_fraction",),
    "i": ("input",),
    "input_file": ("input",),
    "m": ("model",),
    "max_new_tokens": ("max_tokens",),
    "mem_fraction_static": ("cache.memory_fraction",),
    "model_path": ("model",),
    "n": ("max_tokens",),
    "n_predict": ("max_tokens",),
    "o": ("output", "out"),
    "output_file": ("output",),
    "p": ("prompt", "port"),
    "s": ("seed",),
    "served_model_name": ("serve.model_names",),
    "t": ("threads",),
    "temp": ("temperature",),
    "u": ("url", "base_url"),
    "base_url": ("url",),
    "url": ("base_url",),
}
"""Names that a setting has elsewhere; the first that the verb takes is meant."""

REPLACED = {
    "all": "max_gib=0 removes all that no engine uses",
    "data_parallel_size": "serve.api_processes=N answers HTTP in several processes, with one core",
    "enforce_eager": "opt=O0 runs without a compiler",
    "n_gpu_layers": "this version runs on the CPU",
    "quantization": "give a .gguf file; cache.kv_dtype=int8 makes the KV cache smaller",
    "tensor_parallel_size": "one device runs the whole model",
    "tp": "one device runs the whole model",
    "trust_remote_code": "no code of a model's directory is run",
    "verbose": "--debug shows tracebacks, --cfg the settings",
}
"""Advice in place of a setting that other tools have."""


def as_settings(verb: str, words: list[str]) -> list[str]:
    """Return `key=value` words that mean what `words` do.

    Args:
        verb: its full name.
        words: what follows it on the command line, without the flags of every verb.

    Raises:
        ConfigError: it cannot be told what is meant; says what to write.
    """
    if all("=" in word[1:-1] and not word.startswith("-") for word in words):
        return words
    return _Reading(verb, words).run()


class _Reading:
    """One reading of a verb's words, from left to right."""

    def __init__(self, verb: str, words: list[str]) -> None:
        self._verb = verb
        self._words = words
        self._at = 0
        self._bare: str | None = None
        self._types = schema.leaf_types(verb)
        self._known = schema.key_names(verb)

    def run(self) -> list[str]:
        settings = []
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if word.startswith("-"):
                settings.append(self._flag(word))
            elif "=" in word:
                settings.append(self._setting(word))
            else:
                settings.append(self._bare_word(word))
        return settings

    def _next(self) -> str | None:
        return self._words[self._at] if self._at < len(self._words) else None

    def _flag(self, word: str) -> str:
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        key = self._key(name)
        if key is None and self._kind(self._key(name.removeprefix("no_"))) is bool:
            return f"{self._key(name.removeprefix('no_'))}=false"
        if key is None:
            raise ConfigError(self._unknown_flag(word.partition("=")[0], name))
        if equals:
            return f"{key}={value}"
        following = self._next()
        if self._kind(key) is bool and following not in ("true", "false"):
            return f"{key}=true"
        if following is None or (following.startswith("-") and not _is_number(following)):
            raise ConfigError(f"{word} needs a value: write {key}=VALUE")
        self._at += 1
        return f"{key}={following}"

    def _setting(self, word: str) -> str:
        key, _, value = word.partition("=")
        following = self._next()
        if not key:
            raise ConfigError(f"'{word}' has no key before the =; settings are written key=value")
        if not value and following is not None and "=" not in following:
            raise ConfigError(
                f"'{word} {following}': write {key}={shlex.quote(following)}, without a space"
            )
        return word

    def _bare_word(self, word: str) -> str:
        following = self._next()
        key = self._own_key(word)
        if key is not None:
            spaced = following is not None and following.startswith("=")
            value = self._after_equals() if spaced else following
            shown = "VALUE" if value is None or "=" in value else shlex.quote(value)
            raise ConfigError(f"'{word}' needs a value: write {key}={shown}, without spaces")
        if _is_address(word) and "url" in self._known:
            return f"url={word}"
        positional = schema.VERBS[self._verb].positional
        if positional and self._bare is None and (positional != "model" or _is_model(word)):
            self._bare = word
            return f"{positional}={word}"
        raise ConfigError(f"{self._not_a_setting(word)} (`girih {self._verb} --help` lists all)")

    def _after_equals(self) -> str | None:
        """The value of "key = value" or "key =value"."""
        glued = self._words[self._at].removeprefix("=")
        behind = self._words[self._at + 1 : self._at + 2]
        return glued or next(iter(behind), None)

    def _not_a_setting(self, word: str) -> str:
        for key, what in (("prompt", "a text"), ("input", "a file")):
            if key in self._types:
                return f"'{word}' is not a setting; {what} is {key}={shlex.quote(word)}"
        if word.isdigit() and "port" in self._known:
            return f"'{word}' is not a setting; did you mean port={word}?"
        near = nearest(word, self._known)
        if near is not None:
            return f"'{word}' is not a setting; did you mean {near}=VALUE?"
        if self._bare is not None:
            return f"'{word}' is one word too many after '{self._bare}'; settings are key=value"
        if schema.VERBS[self._verb].positional == "model":
            names = ", ".join(name for name in group_options("model") if name != "custom")
            return (
                f"'{word}' is neither a setting (key=value) nor a model: {names}, a directory, "
                "a .gguf file or a hub id such as org/name"
            )
        return f"'{word}' is not a setting; settings are written key=value"

    def _unknown_flag(self, flag: str, name: str) -> str:
        if name in REPLACED:
            return f"{flag} is no setting here: {REPLACED[name]}"
        near = nearest(name, [*self._known, *(k.rpartition(".")[2] for k in self._types)])
        hint = f"; did you mean {self._key(near) or near}=VALUE?" if near else ""
        return (
            f"unknown flag '{flag}'{hint} (`girih {self._verb} --help` lists the settings; flags "
            f"are {', '.join(FLAGS)})"
        )

    def _kind(self, key: str | None) -> Any:
        return self._types.get(schema.ALIASES.get(key or "", key or ""))

    def _key(self, name: str) -> str | None:
        """The setting that a name stands for, if it is certain."""
        others = OTHER_NAMES.get(name, ())
        return self._own_key(name) or next((key for key in others if self._own_key(key)), None)

    def _own_key(self, name: str) -> str | None:
        """The setting of this name, or the only one whose last part it is."""
        if name in self._known:
            return name
        ends = [key for key in self._types if key.rpartition(".")[2] == name]
        return ends[0] if len(ends) == 1 else None


def _is_model(word: str) -> bool:
    """Return whether a word is a model's name, misspelt perhaps, a path or a hub id."""
    if any(letter.isspace() for letter in word):
        return Path(word).is_dir()
    is_place = "/" in word or word.endswith(".gguf") or Path(word).is_dir()
    return is_place or nearest(word.lower(), group_options("model")) is not None


def _is_address(word: str) -> bool:
    return "://" in word or re.fullmatch(r"[\w.-]+:\d+(/v1)?/?", word) is not None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
