"""From the requests of a data set to what an engine takes, without a tokenizer.

Token ids stay as they are. A text counts a token per four characters, and equal pieces of text get
equal ids, so that texts with a common beginning share cached blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.bench.arrivals import arrival_times, arrivals
from girih.serve.bench.config import DatasetConfig, LoadConfig
from girih.serve.bench.datasets import (
    CHARS_PER_TOKEN,
    BenchRequest,
    made_requests,
    make_requests,
)

DueRequest = tuple[float, BenchRequest]


def due_requests(dataset: DatasetConfig, load: LoadConfig) -> tuple[int, Iterator[DueRequest]]:
    """Return the number of requests, and each with its sending time, in the order of these times.

    Made-up requests are made one by one; those of a file are read together.
    """
    if dataset.kind == "random":
        made = made_requests(dataset, as_text=False)
        return dataset.num_requests, arrivals(made, dataset.num_requests, load, dataset.seed)
    requests = make_requests(dataset, as_text=False)
    times = arrival_times(requests, load, dataset.seed)
    due = sorted(zip(times, requests, strict=True), key=lambda pair: pair[0])
    return len(requests), iter(due)


def engine_request(request: BenchRequest, now: float) -> EngineRequest:
    """Build the request for the engine as the server would."""
    return EngineRequest(
        request_id=str(request.index),
        prompt_token_ids=_token_ids(request.prompt),
        sampling=_sampling(request.output_len),
        arrival_time=now,
    )


@lru_cache(maxsize=4096)
def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _token_ids(prompt: str | list[int] | list[dict[str, Any]]) -> list[int]:
    if isinstance(prompt, str):
        return _text_ids(prompt)
    if prompt and isinstance(prompt[0], dict):
        return _text_ids("".join(f"{m['role']}\n{m['content']}\n" for m in prompt))  # type: ignore[index]
    return prompt  # type: ignore[return-value]


def _text_ids(text: str) -> list[int]:
    pieces = range(0, len(text), CHARS_PER_TOKEN)
    return [zlib.crc32(text[at : at + CHARS_PER_TOKEN].encode()) for at in pieces]
