"""From the form of an output to a grammar of llguidance, and its complaints in plain words.

Everything becomes one JSON list of named grammars; the first is the start. Lark text refers to the
others as `@name`.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.closing import prepare
from girih.runtime.structured.gbnf import GbnfError, as_lark
from girih.runtime.structured.lark import quoted
from girih.runtime.structured.llguidance_numbers import rounded
from girih.runtime.structured.schema import find_fault
from girih.runtime.structured.tag_grammar import (
    schemas_of,
    tag_to_lark,
    why_no_lark,
    with_options,
)

LIMITS = LLParserLimits(verbose_errors=False)
NEEDS_XGRAMMAR = "integers beyond 2^53 need xgrammar (the extra girih[xgrammar])"
NO_TOKENIZER = "no tokenizer"


def why_not(structured: StructuredOutput) -> str | None:
    """See `BackendModule.why_not`."""
    if structured.kind == "structural_tag":
        refused = why_no_lark(json.loads(structured.text))
        if refused is not None:
            return refused
    for _, schema in schemas_of(structured):
        if changed := rounded(schema):
            return f"llguidance would round {changed}: {NEEDS_XGRAMMAR}"
    return None


def check(structured: StructuredOutput) -> None:
    """See `BackendModule.check`."""
    refused = why_not(structured)
    if refused is not None:
        raise structured.error(refused)
    fault = fault_of(grammar_text(structured))
    if not fault:
        return
    if structured.kind in ("json_schema", "json_object"):
        schema = _schema(structured)
        place, fault = find_fault(schema, lambda part: fault_of(_schema_text(structured, part)))
        raise structured.error(f"the schema cannot be used, at {place}: {_plain(fault)}")
    if structured.kind == "regex":
        raise structured.error(f"the regex cannot be used: {_plain_regex_fault(fault)}")
    raise structured.error(f"the {structured.kind} cannot be used: {_plain(fault)}")


def fault_of(grammar: str) -> str:
    """Return llguidance's complaint about a grammar; empty when it accepts it."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    # Control tokens are looked up when the grammar is compiled.
    return str(messages[0]) if is_error and NO_TOKENIZER not in messages[0] else ""


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar of a request.

    Raises:
        RequestError: GBNF that cannot be read.
    """
    try:
        answer = _answer_text(structured)
    except GbnfError as error:
        raise structured.error(f"the grammar is not valid GBNF: {error}") from error
    if not structured.before:
        return answer
    grammars = json.loads(answer)["grammars"]
    grammars[0]["name"] = "answer"
    before = {"name": "whole", "lark_grammar": structured.before}
    return json.dumps({"grammars": [before, *grammars]})


def _answer_text(structured: StructuredOutput) -> str:
    kind, text = structured.kind, structured.text
    if kind in ("json_schema", "json_object"):
        return _schema_text(structured, _schema(structured))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        return _of_lark(f"start: {' | '.join(map(quoted, json.loads(text)))}")
    if kind == "structural_tag":
        return _of_lark(tag_to_lark(structured))
    return _of_lark(as_lark(text))


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"name": "lark", "lark_grammar": text}]})


def _schema(structured: StructuredOutput) -> Any:
    if structured.kind == "json_object":
        return {"type": "object"}
    return prepare(json.loads(structured.text), structured.is_closed)


def _schema_text(structured: StructuredOutput, schema: Any) -> str:
    text = json.dumps(with_options(schema, structured.is_compact))
    return str(LLMatcher.grammar_from_json_schema(text))


def _plain(fault: str) -> str:
    """One line of at most 300 characters."""
    return " ".join(fault.split())[:300]


def _plain_regex_fault(fault: str) -> str:
    """The reason and the column of a regular expression's fault."""
    lines = fault.splitlines()
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    carets = [line for line in lines if line.strip() and not line.strip().strip("^")]
    if not reasons or not carets:
        return _plain(fault)
    column = len(carets[0]) - len(carets[0].lstrip()) - 4
    return f"{reasons[0]}, at character {max(column, 0) + 1}"


def refuse(structured: StructuredOutput, fault: str) -> RequestError:
    """The error for a grammar that could not be compiled."""
    return structured.error(f"the {structured.kind} could not be compiled: {_plain(fault)}")
