"""Grammars by xgrammar (an extra: the library brings torch and transformers along)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import xgrammar

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.backend import Mask, Matcher
from girih.runtime.structured.closing import prepare
from girih.runtime.structured.gbnf import is_gbnf
from girih.runtime.structured.tag_grammar import contents, prepared_format, schemas_of
from girih.runtime.structured.vocabulary import Vocabulary
from girih.runtime.structured.xgrammar_schema import fit, passed_over

# The library counts characters between JSON tokens and does not tell newlines from indentation.
MAX_WHITE_SPACE = 2


def why_not(structured: StructuredOutput) -> str | None:
    """See `BackendModule.why_not`."""
    if structured.before:
        return "xgrammar takes no text before the answer; choose llguidance"
    if structured.is_compact:
        return "xgrammar cannot leave out white space; choose llguidance"
    for place, schema in schemas_of(structured):
        fault = passed_over(schema)
        if fault:
            where = f" of {place}" if place else ""
            return f"xgrammar does not keep {fault}{where}; choose llguidance"
    return None


def check(structured: StructuredOutput) -> None:
    """See `BackendModule.check`."""
    tag = json.dumps(_tag_of(structured))
    _asked(structured, lambda: xgrammar.Grammar.from_structural_tag(tag))


class XgrammarMatcher:
    """See `Matcher`."""

    __slots__ = ("backend", "error", "raw")

    def __init__(self, backend: XgrammarBackend, grammar: Any) -> None:
        self.backend = backend
        self.raw = xgrammar.GrammarMatcher(grammar)
        self.error = ""

    @property
    def is_stopped(self) -> bool:
        """See `Matcher.is_stopped`."""
        return bool(self.raw.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        if self.raw.accept_token(token_id):
            return True
        self.error = f"token {token_id} does not satisfy the grammar"
        return False


class XgrammarGrammar:
    """See `Grammar`."""

    def __init__(self, backend: XgrammarBackend, compiled: Any) -> None:
        self._backend = backend
        self._compiled = compiled

    def matcher(self) -> XgrammarMatcher:
        """See `Grammar.matcher`."""
        return XgrammarMatcher(self._backend, self._compiled)


class XgrammarBackend:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        # A token without bytes is never allowed, which is right for control tokens.
        no_text = vocabulary.no_text
        words = [b"" if i in no_text else word for i, word in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            words,
            xgrammar.VocabType.RAW,
            vocab_size=len(words),
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        # girih's own cache holds the grammars.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=num_threads)

    def compile(self, structured: StructuredOutput) -> XgrammarGrammar:
        """See `Backend.compile`."""
        tag = json.dumps(_tag_of(structured))
        compiled = _asked(structured, lambda: self._compiler.compile_structural_tag(tag))
        return XgrammarGrammar(self, compiled)

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], mask: Mask) -> None:
        """See `Backend.fill`."""
        raw = [matcher.raw for matcher in matchers]  # type: ignore[attr-defined]
        self._batch.batch_fill_next_token_bitmask(raw, mask, list(rows))


def make_backend(vocabulary: Vocabulary, num_threads: int) -> XgrammarBackend:
    """See `BackendModule.make_backend`."""
    return XgrammarBackend(vocabulary, num_threads)


def _tag_of(structured: StructuredOutput) -> dict[str, Any]:
    """Every kind as one structural tag, which is xgrammar's most general form."""
    return {"type": "structural_tag", "format": _format_of(structured)}


def _format_of(structured: StructuredOutput) -> dict[str, Any]:
    kind, text = structured.kind, structured.text
    if kind == "json_object":
        return _json({"type": "object"})
    if kind == "json_schema":
        return _json(prepare(json.loads(text), structured.is_closed))
    if kind == "regex":
        return {"type": "regex", "pattern": text}
    if kind == "choice":
        options = [{"type": "const_string", "value": option} for option in json.loads(text)]
        return {"type": "or", "elements": options}
    if kind == "grammar":
        return {"type": "grammar", "grammar": text, "syntax": _syntax(text)}
    found = prepared_format(structured)
    for _, node in contents(found, "json_schema"):
        fit(node["json_schema"])
        node.setdefault("max_whitespace_cnt", MAX_WHITE_SPACE)
    for _, node in contents(found, "grammar"):
        node.setdefault("syntax", _syntax(str(node["grammar"])))
    return found


def _syntax(grammar: str) -> str:
    return "ebnf" if is_gbnf(grammar) else "lark"


def _json(schema: Any) -> dict[str, Any]:
    fit(schema)
    space = {"max_whitespace_cnt": MAX_WHITE_SPACE}
    return {"type": "json_schema", "json_schema": schema, **space}


def _asked(structured: StructuredOutput, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RuntimeError, ValueError) as error:
        # "[time] file:line: what is wrong" shows where in the library it was noticed
        text = " ".join(str(error).split())
        text = text.rpartition("error: ")[2] if "error: " in text else text.split(": ", 1)[-1]
        raise structured.error(f"the {structured.kind} cannot be used: {text[:300]}") from error
