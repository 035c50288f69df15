"""Grammars by llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.backend import Mask, Matcher
from girih.runtime.structured.llguidance_grammar import (
    LIMITS,
    check,
    grammar_text,
    refuse,
    why_not,
)
from girih.runtime.structured.vocabulary import Vocabulary

__all__ = ["check", "make_backend", "why_not"]


class _Words:
    """A vocabulary in the terms of `TokenizerWrapper`."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = sorted(vocabulary.no_text)
        self.tokens = vocabulary.tokens
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class LlguidanceMatcher:
    """See `Matcher`."""

    __slots__ = ("backend", "is_stopped", "raw")

    def __init__(self, backend: LlguidanceBackend, raw: LLMatcher) -> None:
        self.backend = backend
        self.raw = raw
        self.is_stopped = False  # the library's own flag is set before the end token came

    @property
    def error(self) -> str:
        """See `Matcher.error`."""
        return str(self.raw.get_error())[:300]

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        is_accepted = bool(self.raw.consume_token(token_id))
        self.is_stopped = is_accepted and token_id in self.backend.eos_token_ids
        return is_accepted


class LlguidanceGrammar:
    """See `Grammar`: a matcher that never moves; copies of it do."""

    def __init__(self, backend: LlguidanceBackend, raw: LLMatcher) -> None:
        self._backend = backend
        self._raw = raw
        self._lock = threading.Lock()

    def matcher(self) -> LlguidanceMatcher:
        """See `Grammar.matcher`."""
        with self._lock:
            return LlguidanceMatcher(self._backend, self._raw.deep_copy())


class LlguidanceBackend:
    """See `Backend`."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos_token_ids),
        )
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self._executor = LLExecutor(num_threads=num_threads)

    def compile(self, structured: StructuredOutput) -> LlguidanceGrammar:
        """See `Backend.compile`."""
        text = grammar_text(structured)
        raw = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if raw.is_error():
            raise refuse(structured, raw.get_error())
        return LlguidanceGrammar(self, raw)

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], mask: Mask) -> None:
        """See `Backend.fill`."""
        pairs = [(matcher.raw, row) for matcher, row in zip(matchers, rows, strict=True)]  # type: ignore[attr-defined]
        num_rows, num_words = mask.shape
        self._executor.unsafe_compute_mask_ptr(pairs, mask.ctypes.data, num_words * 4, num_rows)


def make_backend(vocabulary: Vocabulary, num_threads: int) -> LlguidanceBackend:
    """See `BackendModule.make_backend`."""
    return LlguidanceBackend(vocabulary, num_threads)
