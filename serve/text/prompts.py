"""Prompts as callers may pass them, and the checks on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.text.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]
FORMS = "text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def as_prompt_list(prompts: Prompt | Sequence[Prompt], name: str = "prompts") -> list[Prompt]:
    """Return a list of prompts; a list of ids is one prompt.

    Args:
        prompts: what a caller gave.
        name: of the argument, for errors.

    Raises:
        RequestError: it, or an entry of it, has no form of a prompt.
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"{name} is {shortened(prompts)}; it must be {FORMS}, or a list of these",
            param="prompt",
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    for place, item in enumerate(items):
        check_form(item, f"{name}[{place}]")
    return items  # type: ignore[return-value]


def check_form(prompt: Any, name: str) -> None:
    """Raise `RequestError` unless a value has one of the forms of a prompt."""
    is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not is_sequence and not isinstance(prompt, dict):
        raise RequestError(f"{name} is {shortened(prompt)}; it must be {FORMS}", param="prompt")


def shortened(value: Any) -> str:
    """A value as an error shows it: its `repr`, of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[str | None, list[int]]:
    """Return (the prompt's text if it was text, its token ids).

    Raises:
        RequestError: an empty prompt, an unknown form, or an id outside the vocabulary.
    """
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
            prompt = list(ids)
        elif ids is not None:
            raise RequestError(
                f"prompt_token_ids is {shortened(ids)}; it must be a list of token ids",
                param="prompt",
            )
        elif isinstance(prompt.get("prompt"), str):
            prompt = str(prompt["prompt"])
        else:
            raise RequestError(
                f"a prompt dict has the keys {sorted(prompt)}; it needs 'prompt' or "
                "'prompt_token_ids'",
                param="prompt",
            )
    if isinstance(prompt, str):
        text, token_ids = prompt, tokenizer.encode(prompt)
    else:
        text, token_ids = None, list(prompt)
    check_prompt_ids(token_ids, vocab_size)
    return text, token_ids


def check_prompt_ids(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise `RequestError` when a prompt is empty or holds an id outside the vocabulary."""
    if not token_ids:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"the prompt has token id {token_id!r}; ids are integers from 0 to "
                f"{vocab_size - 1}",
                param="prompt",
            )


def split_n(params: SamplingParams) -> list[SamplingParams]:
    """Return `n` single-completion parameters; seeded ones draw from seed, seed+1, ..."""
    if params.n == 1:
        return [params]
    return [
        msgspec.structs.replace(
            params, n=1, seed=None if params.seed is None else (params.seed + index) % 2**64
        )
        for index in range(params.n)
    ]
