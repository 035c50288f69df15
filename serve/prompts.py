"""What a caller may hand over as a prompt, and the checks on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from girih.kernels.errors import RequestError
from girih.runtime.sampling_params import SamplingParams
from girih.serve.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of ids is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[str | None, list[int]]:
    """Return (the prompt's text if it was text, its token ids).

    Raises:
        RequestError: an empty prompt, an unknown form, or an id outside the vocabulary.
    """
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            prompt = list(prompt["prompt_token_ids"])
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
            params, n=1, seed=None if params.seed is None else params.seed + index
        )
        for index in range(params.n)
    ]
