"""Log-probabilities in the two shapes OpenAI defines, and vLLM's shape for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from girih.runtime.records.request import TokenLogprobs
from girih.serve.text.detokenizer import make_decoder
from girih.serve.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class TextOffsets:
    """Where each token begins in the text, in characters.

    A token that completes no character shares its offset with the next one.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether the text leaves control tokens out.
        context: tokens before the first one.
        start: offset of the first one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        context: Sequence[int] = (),
        start: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = make_decoder(tokenizer, skip_special_tokens, context)
        self._end = start

    def push(self, token_id: int) -> int:
        """Return the offset of the next token."""
        start = self._end
        text = self._decoder.push(token_id)
        self._end += len(text)
        own = self._tokenizer.token_text(token_id)
        # More text than its own: an unfinished character before it became a replacement mark.
        return self._end - len(own) if own and text.endswith(own) else start


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Return where each token of a prompt begins in its `text`."""
    # A text that spells control tokens out keeps them; one the tokenizer added them to does not.
    skips = tokenizer.decode(token_ids, skip_special_tokens=False) != text
    offsets = TextOffsets(tokenizer, skips)
    return [min(offsets.push(token_id), len(text)) for token_id in token_ids]


class LogprobsFormatter:
    """Formats the log-probabilities of one answer.

    Args:
        tokenizer: gives text and bytes of a token.
        as_token_ids: show tokens as "token_id:N" instead of text.
        num_top: alternatives per token that were asked for.
    """

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._num_top = num_top

    def chat(self, records: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` object of a chat choice."""
        return {"content": [self._chat_entry(record) for record in records]}

    def completion(
        self,
        records: Sequence[TokenLogprobs | None],
        ids: Sequence[int],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """Return the `logprobs` object of a completion choice.

        Args:
            records: one per token; None for the first prompt token.
            ids: the tokens themselves.
            offsets: where each begins in the text, in characters.
        """
        body: dict[str, Any] = {
            "text_offset": list(offsets),
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for record, token_id in zip(records, ids, strict=True):
            token = self._name(token_id)
            body["tokens"].append(token)
            if record is None:
                body["token_logprobs"].append(None)
                body["top_logprobs"].append(None)
                continue
            body["token_logprobs"].append(_finite(record.logprob))
            top: dict[str, float] = {}
            for other_id, value in self._top(record):
                top.setdefault(self._name(other_id), _finite(value))
            top.setdefault(token, _finite(record.logprob))
            body["top_logprobs"].append(top)
        return body

    def prompt(
        self, records: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Return vLLM's `prompt_logprobs`: per token a map from ids to their values."""
        return [None if record is None else self._prompt_entry(record) for record in records]

    def _chat_entry(self, record: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._token(record.token_id, record.logprob),
            "top_logprobs": [self._token(*pair) for pair in self._top(record)],
        }

    def _prompt_entry(self, record: TokenLogprobs) -> dict[str, dict[str, Any]]:
        entry = {
            str(token_id): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for rank, (token_id, value) in enumerate(self._top(record), start=1)
        }
        entry.setdefault(
            str(record.token_id),
            {
                "logprob": _finite(record.logprob),
                "rank": record.rank,
                "decoded_token": self._tokenizer.token_text(record.token_id),
            },
        )
        return entry

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _top(self, record: TokenLogprobs) -> Iterator[tuple[int, float]]:
        pairs = zip(record.top_token_ids, record.top_logprobs, strict=True)
        yield from list(pairs)[: self._num_top]

    def _name(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:  # part of a character; OpenAI spells its bytes out
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST
