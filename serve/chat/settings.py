"""Sampling settings that can be changed during a conversation."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.serve.config import SamplingConfig
from girih.serve.text.sampling_defaults import SamplingDefaults

UNSET = ("null", "none", "")
MAX_SHOWN = 80


class Settings:
    """Values that differ from the model's defaults, by name.

    Args:
        sampling: where they start.
    """

    names = tuple(field.name for field in dataclasses.fields(SamplingConfig))

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling

    @property
    def sampling(self) -> SamplingConfig:
        """All settings as a record."""
        return self._sampling

    def changed(self) -> dict[str, Any]:
        """Return the values that are set, ready for a JSON body."""
        unset = dataclasses.asdict(SamplingConfig())
        values = dataclasses.asdict(self._sampling)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != unset[name]
        }

    def set(self, word: str) -> None:
        """Take `name=value`; `name=null` goes back to the default.

        Raises:
            RequestError: unknown name, or a value that is not allowed; nothing is changed then.
        """
        name, equals, text = (part.strip() for part in word.partition("="))
        if name not in self.names or not equals:
            raise RequestError(
                f"'{word[:MAX_SHOWN]}' is not a setting; write name=value with one of "
                f"{', '.join(self.names)}"
            )
        changed = dataclasses.replace(self._sampling, **{name: _read(name, text)})
        SamplingDefaults(server=changed).build({}, None)
        self._sampling = changed


def _read(name: str, text: str) -> Any:
    kind = typing.get_type_hints(SamplingConfig)[name]
    if text.lower() in UNSET:
        return getattr(SamplingConfig(), name)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise RequestError(f"{name} is '{text[:MAX_SHOWN]}'; it must be true or false")
    if typing.get_origin(kind) is tuple:
        return (_unescaped(name, text),)
    number = int if kind in (int, int | None) else float
    try:
        return number(text)
    except ValueError as error:
        what = "a whole number" if number is int else "a number"
        raise RequestError(f"{name} is '{text[:MAX_SHOWN]}'; it must be {what}") from error


def _unescaped(name: str, text: str) -> str:
    r"""Read escapes such as \n; other characters stay as they are."""
    try:
        if "\\" in text:
            text = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
        text.encode()
    except UnicodeError as error:
        raise RequestError(
            f"{name} is {text[:MAX_SHOWN]!a}, which is not valid Unicode: {error}"
        ) from error
    return text
