"""The bytes each token of a vocabulary stands for (`tokenizers` library only, no torch)."""

from __future__ import annotations

import json

import tokenizers

WORD_MARK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies (character → byte)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet |= {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return alphabet


BYTE_OF = _byte_alphabet()


class TokenBytes:
    """The bytes that the tokens of one tokenizer stand for.

    Args:
        backend: the tokenizer.

    Attributes:
        is_byte_level: every token is bytes, written in the printable alphabet.
        special_ids: control tokens, which are no text.
        byte_ids: token id → byte, of tokens that stand for a byte the vocabulary lacks.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.byte_ids = _byte_token_ids(backend) if "ByteFallback" in kinds else {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; nothing for an id the tokenizer does not know."""
        if token_id in self.byte_ids:
            return bytes([self.byte_ids[token_id]])
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return str(token).replace(WORD_MARK, " ").encode()
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # an added token is written as it is
            return str(token).encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [part["type"] for part in parts]


def _byte_token_ids(backend: tokenizers.Tokenizer) -> dict[int, int]:
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}
