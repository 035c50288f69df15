"""Records that users fill in by hand: a misspelt field is answered with the nearest one."""

from __future__ import annotations

from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError
from girih.kernels.base.names import unknown_name


class NamedFields(msgspec.StructMeta):
    """Metaclass of such records: their fields are given by name.

    Raises (when a record is made):
        RequestError: a field that is none, or a value without a name.
    """

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        """Make a record."""
        if values:
            raise RequestError(
                f"{cls.__name__} was given {values[0]!r} without a name; write its fields by name, "
                f"e.g. {cls.__name__}({cls.__struct_fields__[0]}=...)"
            )
        for name in fields:
            if name not in cls.__struct_fields__:
                known = sorted(cls.__struct_fields__)
                raise RequestError(unknown_name(cls.__name__, "field", name, known), param=name)
        return super().__call__(**fields)
