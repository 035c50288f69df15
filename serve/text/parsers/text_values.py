"""Texts that a model writes without quotes: the regular expression their JSON schema asks for."""

from __future__ import annotations

import re
from typing import Any

from girih.runtime.structured.lark import lark_escaped, unslashed
from girih.serve.text.parsers.grammar_writer import ANY

_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[0-9]{{4}}-{_DAY}"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,8}}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,9}[YMWD]|T[0-9]{1,9}[HMS]|[0-9]{1,9}DT[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}(:[0-9a-f]{1,4})|::1?",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]{1,15}:\/\/[A-Za-z0-9._~:\/?#@!$&'()*+,;=-]+",
}
"""Patterns for JSON Schema's formats: each allows some of the format's values, and no others."""


_TEXTS = ({"string"}, {"string", "null"})


def is_text(schema: Any) -> bool:
    """Return whether a value is text, or null where the schema says so too."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return kinds == "string" or (isinstance(kinds, list) and set(map(str, kinds)) in _TEXTS)


def patterns_of(schema: dict[str, Any]) -> list[str]:
    """Regular expressions that a text must all match; none when its schema asks for nothing."""
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if options is not None:
        return ["|".join(lark_escaped(_word(option)) for option in options)]
    found = [*_form(schema), *_pattern(schema), *_length(schema)]
    or_null = "|null" if "null" in schema["type"] else ""
    return [f"{pattern}{or_null}" for pattern in found]


def _word(option: Any) -> str:
    return "null" if option is None else str(option)


def _form(schema: dict[str, Any]) -> list[str]:
    form = FORMATS.get(str(schema.get("format")))
    return [] if form is None else [form]


def _pattern(schema: dict[str, Any]) -> list[str]:
    """The pattern, which may match a part of the text unless it has anchors."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return []
    starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = unslashed(pattern[int(starts) : len(pattern) - int(ends)])
    return [f"{'' if starts else ANY}({inner}){'' if ends else ANY}"]


def _length(schema: dict[str, Any]) -> list[str]:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    return [f"(.|\\n){{{shortest},{longest}}}"] if shortest or longest != "" else []
