"""What grammar libraries are told of a model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers

from girih.kernels.errors import RequestError
from girih.runtime.token_bytes import TokenBytes


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

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, which names no control tokens."""
        return list(self.encoder.encode(text, add_special_tokens=False).ids)


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
    token_bytes = TokenBytes(encoder)
    return Vocabulary(
        [token_bytes.of(token_id) for token_id in range(vocab_size)],
        token_bytes.special_ids,
        eos_token_ids,
        encoder,
    )
