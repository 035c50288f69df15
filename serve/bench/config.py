"""Settings of one measurement, as frozen records."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from girih.kernels.base.choices import check_choices, one_of, require
from girih.serve.address import server_root

APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KINDS = ("random", "sharegpt", "trace")
RAMPS = ("none", "linear", "exponential")


@dataclass(frozen=True)
class EndpointConfig:
    """The server that is measured.

    Attributes:
        base_url: its address; a path that ends in /v1 is understood.
        api: completions or chat.
        model: name sent with each request; null asks /v1/models.
        api_key: shown as a bearer token; null takes $OPENAI_API_KEY when it is set.
        ignore_eos: ask for exactly the output length (girih, vLLM; unknown to some servers).
        extra_body: JSON object merged into every request, e.g. {"temperature":0}.
        timeout_seconds: longest wait for one request.
        wait_seconds: how long to wait for a server that does not answer yet.
    """

    base_url: str = "http://127.0.0.1:8000"
    api: str = one_of(*APIS)
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    extra_body: str = "{}"
    timeout_seconds: float = 600.0
    wait_seconds: float = 10.0

    def __post_init__(self) -> None:
        check_choices("endpoint", self)
        server_root("endpoint.base_url", self.base_url)
        self.extra_fields()

    @property
    def root(self) -> str:
        """The address without a trailing slash or /v1."""
        return server_root("endpoint.base_url", self.base_url)

    def extra_fields(self) -> dict[str, Any]:
        """Return `extra_body` as a dict."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError:
            fields = None
        require(isinstance(fields, dict), "endpoint.extra_body", self.extra_body, "a JSON object")
        return dict(fields)


@dataclass(frozen=True)
class DatasetConfig:
    """The requests of a measurement.

    Attributes:
        kind: random, sharegpt or trace.
        file: the ShareGPT JSON, or the trace as JSON lines.
        num_requests: how many are sent; 0 takes all of the file.
        seed: fixes every random choice.
        input_len: tokens of a prompt after any shared prefix (chat: about as many words).
        output_len: tokens of an answer; null takes the file's.
        length_spread: lengths vary evenly by this share, in [0, 1).
        prefix_len: tokens of a shared prefix.
        num_prefixes: different shared prefixes.
        token_range: ids of random prompts are from the first up to below the second.
        hash_block: tokens that one of a trace's hash_ids stands for.
        time_unit: seconds that one unit of a trace's timestamp lasts.
    """

    kind: str = one_of(*KINDS)
    file: str | None = None
    num_requests: int = 100
    seed: int = 0
    input_len: int = 128
    output_len: int | None = 64
    length_spread: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    token_range: tuple[int, ...] = (1000, 20000)
    hash_block: int = 512
    time_unit: float = 0.001

    def __post_init__(self) -> None:
        check_choices("dataset", self)
        from_file = self.kind in ("sharegpt", "trace")
        require(
            not from_file or bool(self.file), "dataset.file", self.file, f"a file for {self.kind}"
        )
        smallest = 0 if from_file else 1
        for name, low in (
            ("num_requests", smallest),
            ("input_len", 1),
            ("output_len", 1),
            ("prefix_len", 0),
            ("num_prefixes", 1),
            ("hash_block", 1),
        ):
            value = getattr(self, name)
            require(value is None or value >= low, f"dataset.{name}", value, f"at least {low}")
        require(from_file or self.output_len is not None, "dataset.output_len", None, "at least 1")
        spread = self.length_spread
        require(0 <= spread < 1, "dataset.length_spread", spread, "in [0, 1)")
        ids = self.token_range
        require(
            len(ids) == 2 and 0 <= ids[0] < ids[1], "dataset.token_range", ids, "[low,high] of ids"
        )
        require(self.time_unit > 0, "dataset.time_unit", self.time_unit, "above 0")


@dataclass(frozen=True)
class LoadConfig:
    """When requests are sent.

    Attributes:
        request_rate: requests per second; inf sends them as fast as allowed.
        burstiness: 1 is a Poisson process, below 1 comes in bursts, above 1 is more even.
        max_concurrency: most requests at a time; null sets no limit.
        ramp: none, linear or exponential change of the rate over the requests.
        ramp_start: requests per second at the first request.
        ramp_end: requests per second at the last request.
        speed: a trace is replayed this much faster.
        warmups: requests sent first, one by one, and not counted.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: str = one_of(*RAMPS)
    ramp_start: float = 1.0
    ramp_end: float = 10.0
    speed: float = 1.0
    warmups: int = 1

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "ramp_start", "ramp_end", "speed"):
            value = getattr(self, name)
            require(value > 0, f"load.{name}", value, "above 0")
        check_choices("load", self)
        limit = self.max_concurrency
        require(limit is None or limit >= 1, "load.max_concurrency", limit, "at least 1")
        require(self.warmups >= 0, "load.warmups", self.warmups, "at least 0")


@dataclass(frozen=True)
class SloConfig:
    """Limits of a good request; goodput counts requests that keep all limits set.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: mean time per token after the first.
        itl_ms: longest gap between two pieces of the answer.
        e2e_ms: time to the end of the answer.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.limits().items():
            require(value > 0, f"slo.{name}_ms", value, "above 0")

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by metric name, in ms."""
        names = ("ttft", "tpot", "itl", "e2e")
        values = {name: getattr(self, f"{name}_ms") for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ReportConfig:
    """Files written besides the table on stdout.

    Attributes:
        percentiles: shown for every latency.
        json: file for the summary as JSON.
        records: file for one JSON line per request.
        plots: directory for PNG plots (needs `pip install girih[plot]`).
    """

    percentiles: tuple[float, ...] = (90.0, 95.0, 99.0)
    json: str | None = None
    records: str | None = None
    plots: str | None = None

    def __post_init__(self) -> None:
        allowed = all(0 <= value <= 100 for value in self.percentiles)
        require(allowed, "report.percentiles", self.percentiles, "numbers from 0 to 100")
