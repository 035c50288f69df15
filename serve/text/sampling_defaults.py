"""Where a sampling value comes from: request, then server, then model, then OpenAI's default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from girih.kernels.base.errors import TOO_LONG, RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.config import SamplingConfig

TEXT_MARGIN = 4  # a tokenizer may shorten a text a little before it splits it
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OPENAI_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class SamplingDefaults:
    """Effective defaults of one server.

    Args:
        model: values of the model's generation_config.json.
        server: overrides of the configuration; None fields leave the model's.
    """

    def __init__(
        self, model: dict[str, Any] | None = None, server: SamplingConfig | None = None
    ) -> None:
        server = server or SamplingConfig()
        unset = dataclasses.asdict(SamplingConfig())
        own = {
            name: value
            for name, value in dataclasses.asdict(server).items()
            if value != unset[name] and name != "max_tokens"
        }
        known = {name: value for name, value in (model or {}).items() if name in FROM_MODEL}
        self.values = {**OPENAI_DEFAULTS, **known, **own}
        self.max_tokens = server.max_tokens

    def as_text(self) -> str:
        """Describe the differences from OpenAI's defaults; "" when there are none."""
        values = {**self.values, "max_tokens": self.max_tokens}
        unusual = {n: v for n, v in values.items() if v is not None and v != OPENAI_DEFAULTS.get(n)}
        return ", ".join(f"{name} {value}" for name, value in unusual.items())

    def build(self, fields: dict[str, Any], max_tokens: int | None) -> SamplingParams:
        """Return the parameters of a request; `fields` that are None count as not given.

        Args:
            fields: what the request says.
            max_tokens: used when neither the request nor the server sets one.

        Raises:
            RequestError: a value is not allowed.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        given.setdefault("max_tokens", max_tokens if self.max_tokens is None else self.max_tokens)
        return SamplingParams(**{**self.values, **given})


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return the sampling values of a model directory's generation_config.json, {} without one."""
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError:
        return {}
    return {name: content[name] for name in FROM_MODEL if content.get(name) is not None}


def check_text_room(text: str, longest_token: int, max_model_len: int) -> None:
    """Refuse a text that is too long whatever its tokens are, before the work of finding them.

    Raises:
        RequestError: it has many times the characters that fit.
    """
    if len(text) > TEXT_MARGIN * max_model_len * longest_token:
        raise RequestError(
            f"the prompt has {len(text)} characters, more than fit into the model's context of "
            f"{max_model_len} tokens (max_model_len); shorten it",
            param="prompt",
            code=TOO_LONG,
        )


def check_room(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens may be generated: `max_tokens`, cut to the room left.

    Raises:
        RequestError: the prompt leaves no room for one token (0 `max_tokens` need none).
    """
    room = max_model_len - num_prompt_tokens
    least = 0 if max_tokens == 0 else 1
    if room < least:
        wanted = "not set" if max_tokens is None else str(max_tokens)
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and the model's context is "
            f"{max_model_len} (max_model_len), which leaves no room for an answer "
            f"(max_tokens is {wanted}); shorten the prompt to at most "
            f"{max_model_len - least} tokens",
            param="prompt",
            code=TOO_LONG,
        )
    return room if max_tokens is None else min(max_tokens, room)
