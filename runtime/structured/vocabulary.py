"""A model's vocabulary as grammar libraries need it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from girih.kernels.base.errors import RequestError
from girih.runtime.structured.token_bytes import TokenBytes


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as bytes.

    Attributes:
        tokens: bytes of each of the V tokens; empty for ids without a token.
        special_ids: control tokens, which no text contains.
        eos_token_ids: ids that end an output.
        encoder: splits text into tokens.
    """

    tokens: list[bytes]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encoder: tokenizers.Tokenizer

    @functools.cached_property
    def no_text(self) -> frozenset[int]:
        """Ids that are never part of a text: control tokens, and what ends an output."""
        return self.special_ids | frozenset(self.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Return tokens of text whose bytes are those of `text`.

        They are the encoder's, as it splits the beginning or the inside of a text. What it would
        change (a control token for its name, a normal form, a space in front) is spelled with the
        longest tokens that fit.
        """
        wanted = text.encode()
        for start in ("", "\n"):
            ids = self.encoder.encode(start + text, add_special_tokens=False).ids
            words = [self._text_of(token_id) for token_id in ids]
            behind = _behind(words, start.encode())
            if b"".join(words[behind:]) == wanted:
                return list(ids[behind:])
        return self._longest(wanted)

    def _text_of(self, token_id: int) -> bytes:
        is_text = token_id < len(self.tokens) and token_id not in self.no_text
        return self.tokens[token_id] if is_text else b"\0"

    def _longest(self, wanted: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(wanted):
            longest = min(len(wanted), start + self._max_size)
            ends = range(longest, start, -1)
            end = next((end for end in ends if wanted[start:end] in self._words), 0)
            if not end:  # no token has this byte
                break
            ids.append(self._words[wanted[start:end]])
            start = end
        return ids

    @functools.cached_property
    def _words(self) -> dict[bytes, int]:
        return {word: i for i, word in enumerate(self.tokens) if word and i not in self.no_text}

    @functools.cached_property
    def _max_size(self) -> int:
        return max(map(len, self._words), default=0)


def _behind(words: list[bytes], start: bytes) -> int:
    """Count the first words that make up `start`, with or without a space before it."""
    seen = b""
    for index, word in enumerate(words):
        if seen.lstrip(b" ") == start:
            return index
        seen += word
    return len(words)


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Read the vocabulary of a model directory.

    Args:
        path: directory with tokenizer.json.
        vocab_size: V, the width of the logits.
        eos_token_ids: ids that end an output.

    Raises:
        RequestError: structured output cannot be had with this model.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        raise RequestError("structured output needs a tokenizer.json, which this model lacks")
    if not eos_token_ids:
        raise RequestError("structured output needs a model with an end-of-sequence token")
    encoder = tokenizers.Tokenizer.from_file(str(file))
    encoder.encode_special_tokens = True  # the names of control tokens are text
    token_bytes = TokenBytes(encoder)
    return Vocabulary(
        [token_bytes.of(token_id) for token_id in range(vocab_size)],
        token_bytes.special_ids,
        eos_token_ids,
        encoder,
    )
