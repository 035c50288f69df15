"""Token ids to text, a few at a time.

    ids ─▶ TextDecoder ─▶ characters ─▶ StopMatcher ─▶ text that may be shown
           (whole UTF-8      held back while they
            characters)      could begin a stop string)

Invariants: deltas concatenate to the text of all ids decoded at once, without a character that the
output ends inside of; no delta ends inside a character; no part of a stop string is ever shown
unless it is asked for.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6


class Vocabulary(Protocol):
    """The part of a tokenizer that decoding needs (see `girih.serve.text.tokenizer.Tokenizer`)."""

    is_byte_level: bool

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids at once."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, of a byte-level vocabulary or one of `is_byte_token`."""

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is left out of text."""

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token stands for one byte of a character the vocabulary lacks."""


class TextDecoder(Protocol):
    """Turns one token at a time into text."""

    def push(self, token_id: int) -> str:
        """Return the characters that are complete with this token."""

    def flush(self) -> str:
        """Return what is still pending at the end; half a character is dropped."""


class ByteLevelDecoder:
    """Decoder of byte-level vocabularies (GPT-2, Llama 3, SmolLM2): every token is bytes."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that are complete with this token."""
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        """Return nothing: what is pending is half a character."""
        return ""


class WindowDecoder:
    """Decoder of every other vocabulary: decodes a small window with and without the new token.

    Such decoders look at their neighbours (a space before a word, runs of byte tokens), so a
    window starts a few tokens early, and ends only after a token that later ones cannot change.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._window = [
            token_id
            for token_id in context[-4 * CONTEXT_TOKENS :]
            if not (skip_special_tokens and vocabulary.is_special(token_id))
        ][-CONTEXT_TOKENS:]
        self._num_shown = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the characters that are complete with this token."""
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""
        self._window.append(token_id)
        if self._vocabulary.is_byte_token(token_id):
            return ""  # a run of bytes decodes as a whole
        return self._take(final=False)

    def flush(self) -> str:
        """Return what is still pending at the end; half a character is dropped."""
        del self._window[len(self._window) - self._num_unfinished() :]
        return self._take(final=True)

    def _num_unfinished(self) -> int:
        """Count the tokens at the end that are bytes of an incomplete character."""
        pending = reversed(self._window[self._num_shown :])
        run = list(itertools.takewhile(self._vocabulary.is_byte_token, pending))[::-1]
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        utf8.decode(b"".join(map(self._vocabulary.token_bytes, run)))
        return len(utf8.getstate()[0])

    def _take(self, final: bool) -> str:
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        if not final and text.endswith(REPLACEMENT):
            return ""
        self._window = self._window[-CONTEXT_TOKENS:]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, self._skip_special)


def make_decoder(
    vocabulary: Vocabulary, skip_special_tokens: bool, context: Sequence[int] = ()
) -> TextDecoder:
    """Choose the decoder for a vocabulary; `context` are the tokens before the first one."""
    if vocabulary.is_byte_level:
        return ByteLevelDecoder(vocabulary, skip_special_tokens)
    return WindowDecoder(vocabulary, skip_special_tokens, context)


def decode_output(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """The text of an output that stands alone, at once."""
    decoder = make_decoder(vocabulary, skip_special_tokens=True)
    return "".join([*map(decoder.push, token_ids), decoder.flush()])


class StopMatcher:
    """Finds the first stop string to be completed, whatever pieces the text comes in."""

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._longest = max((len(text) for text in self._stop), default=0)
        # Held text ends in a character that is inside a stop string, but not its last.
        self._inner_characters = frozenset("".join(text[:-1] for text in self._stop))
        self._held = ""

    @property
    def has_stops(self) -> bool:
        """True if there is anything to find."""
        return bool(self._stop)

    def push(self, delta: str, armed: bool) -> tuple[str, str | None]:
        """Add text; return (text that may be shown, the stop string that was completed or None).

        Args:
            delta: new characters.
            armed: False while the request must go on (`min_tokens`): nothing matches yet.
        """
        if not self._stop:
            return delta, None
        text = self._held + delta
        hit = self._first_completed(text, len(self._held)) if armed else None
        if hit is None:
            keep = self._num_to_hold(text)
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep], None
        end, matched = hit
        self._held = ""
        return text[: end if self._include else end - len(matched)], matched

    def flush(self) -> str:
        """Return the held text when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The match that ends first (the longest of those), among those ending in new text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), -len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        if not text or text[-1] not in self._inner_characters:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stop if len(stop) > size):
                return size
        return 0


class DetokenizedStep(NamedTuple):
    """The change of the text by new tokens.

    Attributes:
        text: characters that may be shown now.
        num_tokens: how many of the new tokens count (fewer after a stop string).
        stop: the stop string that ended the output, or None.
    """

    text: str
    num_tokens: int
    stop: str | None


class Detokenizer:
    """Text of one request's output, with its stop strings applied.

    Args:
        vocabulary: the tokenizer.
        stop: strings that end the output.
        include_stop: keep the matched string in the text.
        min_tokens: no stop string counts before this many tokens.
        skip_special_tokens: leave special tokens out.
        context: prompt tokens before the output (a decoder may need them for the first space).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self._decoder = make_decoder(vocabulary, skip_special_tokens, context)
        self._matcher = StopMatcher(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> DetokenizedStep:
        """Add tokens; stop at the first completed stop string."""
        if not self._matcher.has_stops:
            text = "".join([self._decoder.push(token_id) for token_id in token_ids])
            return DetokenizedStep(text, len(token_ids), None)
        shown = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, stop = self._matcher.push(
                self._decoder.push(token_id), armed=self._num_tokens >= self._min_tokens
            )
            shown += text
            if stop is not None:
                return DetokenizedStep(shown, count, stop)
        return DetokenizedStep(shown, len(token_ids), None)

    def finish(self) -> DetokenizedStep:
        """Return the text that was held back when the output ends."""
        armed = self._num_tokens >= self._min_tokens
        text, stop = self._matcher.push(self._decoder.flush(), armed=armed)
        return DetokenizedStep(text if stop else text + self._matcher.flush(), 0, stop)
