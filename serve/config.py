"""The front end's settings, as frozen records (no torch, no Hydra, no FastAPI)."""

from __future__ import annotations

from dataclasses import dataclass, field

from girih.kernels.base.choices import check_choices, one_of, require
from girih.kernels.base.errors import ConfigError
from girih.serve.text.parsers.registry import reasoning_formats, tool_formats


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling defaults; null asks the model's generation_config.json, then OpenAI's default.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: best k tokens; 0 is off.
        min_p: smallest probability relative to the best, in [0, 1].
        repetition_penalty: above 1 discourages repeats of prompt and output.
        presence_penalty: flat penalty of tokens already produced, in [-2, 2].
        frequency_penalty: penalty per earlier occurrence, in [-2, 2].
        max_tokens: longest output in tokens.
        min_tokens: tokens before an end is allowed.
        seed: fixes the random draw of a request.
        stop: strings that end the output (never shown).
        ignore_eos: go on after the end token.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass
class MetricsConfig:
    """Settings of /metrics.

    Attributes:
        prefix: in front of every name, instead of "girih:" (e.g. "vllm:" for its dashboards).
        guard: ask for an API key there, and on /load, too.
    """

    prefix: str = "girih:"
    guard: bool = False


@dataclass(frozen=True)
class ServeConfig:
    """The HTTP server and its limits.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        model_names: names by which clients may ask for the model, the first in answers; empty goes
            by model.name, then by what the files are called.
        api_keys: keys a client must show; empty leaves the server open.
        admin_key: opens the routes under /admin; null leaves them out.
        cors_origins: origins whose pages may call this server from a browser, e.g.
            "https://chat.example.com"; "*" allows all.
        ssl_certfile: PEM file with the certificate chain; with it the server speaks HTTPS only.
        ssl_keyfile: PEM file with its key; null when `ssl_certfile` holds it too.
        max_body_bytes: largest request body, as sent and decompressed.
        body_seconds: how long a body may take to arrive, and before it the head of a request.
        max_prompts: prompts in one completion request.
        max_choices: prompts times choices in one request.
        max_n: choices per prompt.
        max_stop_strings: stop strings per request.
        max_logprobs: alternatives per token.
        max_stored_responses: finished turns of /v1/responses kept in memory (by a single API
            process; several keep none).
        max_stored_bytes: how large they may be together.
        trust_request_chat_template: requests may bring their own chat template.
        tool_parser: how the model writes tool calls; "auto" asks its chat template, and tells the
            model in words where that says nothing.
        reasoning_parser: how it marks reasoning; "auto" asks its chat template, "none" leaves
            it in the content.
        stall_seconds: a step running longer makes /health fail.
        keep_alive_seconds: silence in a stream before a comment line is sent.
        drain_seconds: how long running requests may go on after SIGTERM.
        api_processes: processes that answer HTTP; more than one share one core.
        log_requests: one access line per request (never the prompt).
        log_style: "text" or "json".
        otlp_endpoint: URL of an OpenTelemetry receiver (OTLP over HTTP, usually port 4318) that
            gets a span per request; needs the extra `otel`.
        metrics: `prefix` of metric names on /metrics; `guard` asks for an API key there and on
            /load too.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    body_seconds: float = 60.0
    max_prompts: int = 1024
    max_choices: int = 4096
    max_n: int = 128
    max_stop_strings: int = 16
    max_logprobs: int = 20
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 1024 * 1024
    trust_request_chat_template: bool = False
    tool_parser: str = one_of("auto", "none", more=tool_formats)
    reasoning_parser: str = one_of("auto", "none", more=reasoning_formats)
    stall_seconds: float = 120.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    api_processes: int = 1
    log_requests: bool = True
    log_style: str = one_of("text", "json")
    otlp_endpoint: str | None = None
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "serve.port", self.port, "0 to 65535")
        check_choices("serve", self)
        if self.admin_key == "" or self.admin_key in self.api_keys:
            raise ConfigError(
                "serve.admin_key is empty or one of serve.api_keys; give it a value of its own"
            )
        if self.otlp_endpoint is not None and "://" not in self.otlp_endpoint:
            raise ConfigError(
                f"serve.otlp_endpoint is {self.otlp_endpoint!r}; it is a URL such as "
                "http://localhost:4318"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("serve.ssl_keyfile is set without serve.ssl_certfile; set both")
        for origin in self.cors_origins:
            scheme, colon, host = origin.partition("://")
            is_origin = colon and scheme in ("http", "https") and host and "/" not in host
            if origin != "*" and not is_origin:
                raise ConfigError(
                    f"serve.cors_origins has {origin!r}; an origin is scheme://host[:port] without "
                    "a path, or * for all"
                )
        if any(not key for key in self.api_keys):
            raise ConfigError("serve.api_keys holds an empty key; remove it or give it a value")
        if "" in self.model_names or len(set(self.model_names)) < len(self.model_names):
            raise ConfigError(
                f"serve.model_names is {list(self.model_names)}; give names that are not empty, "
                "each once"
            )
        for name in (
            "api_processes",
            "max_body_bytes",
            "max_prompts",
            "max_choices",
            "max_n",
            "max_stop_strings",
        ):
            value = getattr(self, name)
            require(value >= 1, f"serve.{name}", value, "at least 1")
        for name in ("stall_seconds", "keep_alive_seconds", "body_seconds"):
            value = getattr(self, name)
            require(value > 0, f"serve.{name}", value, "above 0")


@dataclass(frozen=True)
class ExplainConfig:
    """Output of `girih explain`.

    Attributes:
        html: file for a page with passes, program map and tile costs; null prints text.
    """

    html: str | None = None


@dataclass(frozen=True)
class CheckConfig:
    """Settings of the comparison by `girih check`.

    Attributes:
        layers: how many of the model's layers; null takes all.
    """

    layers: int | None = None


@dataclass(frozen=True)
class BenchConfig:
    """One offline measurement.

    Attributes:
        workload_file: JSON file that lists the workloads.
        workloads: names to run; empty runs all.
        rounds: repeats per workload; the best time counts.
    """

    workload_file: str | None = None
    workloads: tuple[str, ...] = ()
    rounds: int = 2

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "bench.rounds", self.rounds, "at least 1")
