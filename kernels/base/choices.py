"""Settings that take one of a few values.

The values stand with the field, so that the check, the help and a shell's completion agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.names import nearest

CHOICES = "choices"


def one_of(
    *values: str,
    default: str | None = "",
    more: Callable[[], Iterable[str]] = tuple,
) -> Any:
    """A dataclass field that takes one of `values`.

    Args:
        values: what is allowed.
        default: when nothing is set: the first of them unless it is given.
        more: what is allowed too, asked for when it is needed (plug-ins).
    """
    first = values[0] if default == "" else default
    return dataclasses.field(default=first, metadata={CHOICES: lambda: (*values, *more())})


def choices_of(record: Any) -> dict[str, tuple[str, ...]]:
    """Return the values that each field made by `one_of` allows."""
    return {
        field.name: field.metadata[CHOICES]()
        for field in dataclasses.fields(record)
        if CHOICES in field.metadata
    }


def check_choices(section: str, record: Any) -> None:
    """Hold the fields of `record` against what they allow.

    Raises:
        ConfigError: one has another value; names it as `section.field`.
    """
    for name, allowed in choices_of(record).items():
        value = getattr(record, name)
        if value not in allowed and value != type(record).__dataclass_fields__[name].default:
            near = nearest(str(value), allowed)
            hint = f"; did you mean '{near}'?" if near else ""
            raise ConfigError(
                f"{section}.{name} is {value!r}; it must be one of {', '.join(allowed)}{hint}"
            )


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Check one value.

    Args:
        holds: whether the value may stand.
        name: the setting, as `section.field`.
        value: what was seen.
        allowed: what it must be, e.g. "at least 1".

    Raises:
        ConfigError: it may not.
    """
    if not holds:
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")
