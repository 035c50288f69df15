"""Plain nested values (of YAML, a command line, keyword arguments) to frozen records, checked."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import unknown_name

T = TypeVar("T")
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_MANY = {int: "integers", float: "numbers", str: "texts"}


def to_record(record: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build dataclass `record` from plain values: nested records, lists as tuples, paths as text.

    Args:
        record: a dataclass; its own checks run last.
        values: by field name; fields that are left out take their defaults.
        where: key of the whole, in front of the names of its fields in messages.

    Raises:
        ConfigError: an unknown field (with the nearest one), or a value of another type.
    """
    hints = typing.get_type_hints(record)
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(unknown_name(where or record.__name__, "field", name, hints))
        ready[name] = _checked(f"{where}.{name}" if where else name, value, hints[name])
    return record(**ready)


def _checked(key: str, value: Any, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return to_record(typing.cast("type[Any]", kind), value, key)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(f"{key} is {value!r}; it must be {_in_words(kind)}") from None


def _in_words(kind: Any) -> str:
    """A field's type for people, e.g. "an integer, text or None"."""
    if isinstance(kind, types.UnionType):
        words = ["None" if k is types.NoneType else _in_words(k) for k in typing.get_args(kind)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    entries = typing.get_args(kind)
    return f"a list of {_MANY[entries[0]]}" if entries else _WORDS.get(kind, kind.__name__)
