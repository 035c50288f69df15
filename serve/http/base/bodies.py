"""From the bytes of a request to a checked body: strict JSON, strict types, clear refusals.

JSON is read twice: once to refuse what JSON cannot mean (a field given twice, NaN, Infinity), once
by pydantic into the record.
"""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, Never, TypeVar, get_args

import msgspec
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from girih.serve.http.base.errors import ApiError

logger = logging.getLogger("girih.serve")
_reported: set[str] = set()
MAX_SHOWN = 80


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is the integer 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), le=2**63 - 1)]
"""A 64-bit integer, also when it is written with a decimal point."""


class Part(BaseModel):
    """An object inside a body; unknown fields are kept aside."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Body(Part):
    """A request body.

    Attributes:
        unset_when_empty: fields of a class whose empty text, list or object says as much as null.
    """

    unset_when_empty: ClassVar[tuple[str, ...]] = ()
    _without_effect: set[str] = PrivateAttr(default_factory=set)

    def model_post_init(self, context: Any, /) -> None:
        """Unset the fields that are empty."""
        kinds = type(self).__mro__
        for name in {n for kind in kinds for n in vars(kind).get("unset_when_empty", ())}:
            if getattr(self, name) in ("", [], {}):
                setattr(self, name, None)
                self.ignore(name)

    def ignore(self, name: str) -> None:
        """Note a field that is known, but has no effect here, and harms nobody by that."""
        self._without_effect.add(name)

    def ignored_fields(self) -> list[str]:
        """Names of fields that have no effect, also of unknown ones inside known objects."""
        parts = {n: v for n in self.model_fields_set if isinstance(v := getattr(self, n), Part)}
        inside = [f"{name}.{n}" for name, part in parts.items() for n in part.model_extra or {}]
        return sorted({*(self.model_extra or {}), *inside, *self._without_effect})


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType]) -> BodyType:
    """Read the body of a request.

    Raises:
        ApiError: 415, it is not declared as JSON; 400, see `parse_body`.
    """
    declared = request.headers.get("content-type", "application/json")
    kind_of_content = declared.partition(";")[0].strip().lower()
    if kind_of_content != "application/json" and not kind_of_content.endswith("+json"):
        raise ApiError(
            415,
            f"content-type is {declared[:MAX_SHOWN]!r}; it must be application/json "
            "(curl: -H 'content-type: application/json')",
        )
    return parse_body(kind, await request.body())


def parse_body(kind: type[BodyType], raw: bytes) -> BodyType:
    """Read a JSON body.

    Raises:
        ApiError: 400, not JSON, or a field of the wrong type (names the first few).
    """
    _check_json(raw)
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise _as_api_error(kind, error) from error


def make_body(kind: type[BodyType], fields: dict[str, Any]) -> BodyType:
    """Make a body from the fields of another one.

    Raises:
        ApiError: 400, a field of the wrong type.
    """
    try:
        return kind.model_validate_json(msgspec.json.encode(fields), strict=True)
    except ValidationError as error:
        raise _as_api_error(kind, error) from error


def ignored_header(
    body: Body, made: Body | None = None, sent_as: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the header that names ignored fields, {} when there are none; they are logged once.

    Args:
        body: the request as it was sent.
        made: the one of another route that was made from it.
        sent_as: field of that one → field here.
    """
    of_made = made.ignored_fields() if made is not None else ()
    fields = sorted({*body.ignored_fields(), *((sent_as or {}).get(n, n) for n in of_made)})
    for name in fields:
        if name not in _reported and len(_reported) < 1000:
            _reported.add(name)
            logger.warning("request field %r has no effect and was ignored", name[:64])
    names = [name.encode("ascii", "replace").decode()[:64] for name in fields[:20]]
    printable = [name for name in names if name.isprintable()]
    return {"x-girih-ignored": ", ".join(printable)} if printable else {}


def _check_json(raw: bytes) -> None:
    try:
        json.loads(raw.decode(), object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: {error.reason}", code="json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="json") from error


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0][:MAX_SHOWN]
        raise ApiError(400, f"the field {twice!r} is given twice in one object", twice, "json")
    return fields


def _refuse_constant(name: str) -> Never:
    raise ApiError(400, f"the body has the value {name}, which JSON does not allow", code="json")


def _as_api_error(kind: type[Body], error: ValidationError) -> ApiError:
    problems = _one_per_field(kind, error.errors(include_url=False, include_context=False))
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problems[0]['msg']}", code="json")
    texts: list[str] = []
    for problem in problems[:4]:
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        seen = _shown(problem["input"]) if problem["type"] != "missing" else "missing"
        texts.append(f"{field[:MAX_SHOWN]}: {problem['msg']} (got {seen})")
    param = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
    return ApiError(400, "; ".join(texts), param)


def _one_per_field(kind: type[Body], problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The problems, with one instead of many for a field that may have one of several types.

    Pydantic tells what is wrong with each type, under names of its own.
    """
    by_field: dict[Any, list[ErrorDetails]] = {}
    for problem in problems:
        by_field.setdefault(problem["loc"][:1], []).append(problem)
    found: list[ErrorDetails] = []
    for loc, group in by_field.items():
        field = kind.model_fields.get(str(loc[0])) if loc else None
        types = {*get_args(field.annotation)} - {NoneType} if field is not None else set()
        if field is None or len(types) < 2:
            found += group
        else:
            found.append(_of_union(group, field.description or ""))
    return found


def _of_union(group: Sequence[ErrorDetails], description: str) -> ErrorDetails:
    """The entry that the type which fits best does not take, or what the field may be."""

    def place(problem: ErrorDetails) -> int:
        inside = problem["loc"][2:3]
        return inside[0] if inside and isinstance(inside[0], int) else -1

    firsts: dict[Any, ErrorDetails] = {}  # of each type, whose name is behind the field's
    for problem in group:
        firsts.setdefault(problem["loc"][1:2], problem)
    best, shortest = max(firsts.values(), key=place), min(group, key=lambda p: len(p["loc"]))
    if place(best) >= 0:
        return {**best, "loc": (best["loc"][0], *best["loc"][2:])}
    return {**shortest, "loc": shortest["loc"][:1], "msg": description or shortest["msg"]}


def _shown(value: Any) -> str:
    """`value` for a message; a large container is not spelled out first."""
    if isinstance(value, list | dict) and len(value) > MAX_SHOWN:
        return f"{type(value).__name__} of {len(value)} entries"
    if isinstance(value, str):
        value = value[:MAX_SHOWN]
    return repr(value)[:MAX_SHOWN]
