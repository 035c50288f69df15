"""Structured output of a request (no torch, no grammar library; crosses process borders).

The record checks what is cheap: its kind, its size. Whether a grammar library can read it is
asked by `backends.check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
BACKENDS = ("auto", "llguidance", "xgrammar")
MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_CHOICES = 10_000


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The form of one request's output; make it with one of the class methods.

    Equal records share one compiled grammar.

    Attributes:
        kind: one of `KINDS`.
        text: JSON text of the schema, of the list of choices or of the structural tag; the
            regular expression; the grammar (GBNF or Lark). Empty for json_object.
        backend: the library that does it; "auto" takes the first that can.
        is_compact: JSON without white space between its tokens.
        is_closed: objects have no properties beyond those their schema names.
        before: Lark grammar of the whole output, in which `@answer` stands for this form; empty
            when the form is all there is.
        param: the request field it came from, for errors.
    """

    kind: str
    text: str = ""
    backend: str = "auto"
    is_compact: bool = False
    is_closed: bool = False
    before: str = ""
    param: str = "structured"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise self.error(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if self.backend not in BACKENDS:
            raise self.error(
                f"backend is {self.backend!r}; it must be one of {', '.join(BACKENDS)}"
            )
        if self.kind != "json_object" and not self.text:
            raise self.error(f"the {self.kind} is empty; give one, or leave it out")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise self.error(f"the {self.kind} has {size} bytes; at most {MAX_BYTES} are allowed")
        if "\0" in self.text:
            raise self.error(f"the {self.kind} has a NUL character; remove it")

    def error(self, message: str) -> RequestError:
        """Return an error about this request's field."""
        return RequestError(f"{self.param}: {message}", param=self.param)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str, **fields: Any) -> StructuredOutput:
        """JSON that a schema accepts (as a value or as JSON text).

        Raises:
            RequestError: not JSON, too large or nested too deeply.
        """
        return cls._of_json("json_schema", schema, fields)

    @classmethod
    def json_object(cls, **fields: Any) -> StructuredOutput:
        """Any JSON object."""
        return cls(kind="json_object", **fields)

    @classmethod
    def regex(cls, pattern: str, **fields: Any) -> StructuredOutput:
        """Text that a regular expression matches as a whole."""
        return cls(kind="regex", text=_checked_text("regex", pattern, fields), **fields)

    @classmethod
    def choice(cls, choices: Sequence[str], **fields: Any) -> StructuredOutput:
        """One of several texts.

        Raises:
            RequestError: none, too many, or one that is empty or no text.
        """
        param = fields.get("param", "structured")
        if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= MAX_CHOICES:
            raise RequestError(
                f"{param}: choice must be a list of 1 to {MAX_CHOICES} texts", param=param
            )
        for index, text in enumerate(choices):
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"{param}: choice[{index}] is {text!r}; it must be a text that is not empty",
                    param=param,
                )
        return cls(kind="choice", text=json.dumps(list(choices)), **fields)

    @classmethod
    def grammar(cls, text: str, **fields: Any) -> StructuredOutput:
        """Text of a context-free grammar: GBNF with a rule `root ::=`, or Lark with `start:`."""
        return cls(kind="grammar", text=_checked_text("grammar", text, fields), **fields)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any] | str, **fields: Any) -> StructuredOutput:
        """Free text with constrained parts between tags (xgrammar's format).

        Raises:
            RequestError: not JSON, too large or nested too deeply.
        """
        return cls._of_json("structural_tag", tag, fields)

    @classmethod
    def _of_json(cls, kind: str, value: Any, fields: dict[str, Any]) -> StructuredOutput:
        param = fields.get("param", "structured")
        try:
            if isinstance(value, str):
                value = json.loads(value)
            place = too_deep(value)
            if place is None:
                text = json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise RequestError(f"{param}: the {kind} is not JSON: {error}", param=param) from error
        except RecursionError:
            place = "/"
        if place is not None:
            raise RequestError(
                f"{param}: the {kind} is nested deeper than {MAX_DEPTH} levels at {place[:200]}",
                param=param,
            )
        if not isinstance(value, dict | bool):
            raise RequestError(
                f"{param}: the {kind} is a {type(value).__name__}; it must be an object",
                param=param,
            )
        return cls(kind=kind, text=text, **fields)


def _checked_text(kind: str, text: Any, fields: dict[str, Any]) -> str:
    if not isinstance(text, str):
        param = fields.get("param", "structured")
        raise RequestError(
            f"{param}: the {kind} is a {type(text).__name__}; it must be a text", param=param
        )
    return text


def too_deep(value: Any) -> str | None:
    """The place (JSON pointer) where `value` is nested deeper than MAX_DEPTH, or None."""
    stack: list[tuple[str, int, Any]] = [("", 0, value)]
    while stack:
        place, depth, node = stack.pop()
        if depth > MAX_DEPTH:
            return place
        stack.extend((f"{place}/{key}", depth + 1, child) for key, child in children(node))
    return None


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a JSON container with their steps of a JSON pointer."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield str(key).replace("~", "~0").replace("/", "~1"), child
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield str(index), child
