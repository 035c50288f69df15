"""The runtime's settings, as frozen records (no torch, no Hydra).

The command line and `LLM` both end here: `EngineConfig` is the only configuration object that
travels into the engine, and nothing mutates it. Resolved facts (block counts, model length) are
returned by the stage that computed them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from girih.kernels.base.choices import check_choices, one_of, require
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.target import ISAS
from girih.passes.options import OptConfig

KV_DTYPES = ("auto", "int8")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which precision.

    Attributes:
        source: HF directory, `.gguf` file, hub id, or a built-in name (`smollm2`, `gemma3_270m`;
            `minilm` embeds).
        dtype: "auto" takes the checkpoint's; else one of `DTYPES`.
        max_model_len: longest prompt + output in tokens; None takes the model's own limit, "auto"
            that limit or the largest length whose KV fits the memory. A model whose files name
            none (Mamba, Bloom) needs a number.
        name: name shown by the server; None takes the source's last path part.
        task: "auto" goes by the model's head; else "generate", "embed" or "classify".
        pooling: how an embedding is made of hidden states: "last" or "cls" (last or first token),
            "mean", "all" (one vector per token); "auto" goes by the model's files.
        matryoshka: whether embeddings may be cut to fewer dimensions; None goes by the files.
    """

    source: str = "smollm2"
    dtype: str = one_of(*DTYPES)
    max_model_len: int | str | None = None
    name: str | None = None
    task: str = one_of("auto", "generate", "embed", "classify")
    pooling: str = one_of("auto", "last", "cls", "mean", "all")
    matryoshka: bool | None = None

    def __post_init__(self) -> None:
        check_choices("model", self)
        length = self.max_model_len
        holds = length in (None, "auto") if not isinstance(length, int) else length >= 2
        require(holds, "model.max_model_len", length, "at least 2 tokens, or 'auto'")


@dataclass(frozen=True)
class TargetConfig:
    """The target of compilation.

    Attributes:
        device: "cpu", or "cuda" to prepare a bundle for a machine with a GPU.
        isa: "auto" detects; else "generic", "avx2", "avx512", "avx512_bf16" or "amx_bf16".
        threads: compute threads; 0 takes torch's default (physical cores).
        arch: GPU architecture, e.g. "sm_90"; "auto" asks the GPU of this machine.
    """

    device: str = one_of("cpu", "cuda")
    isa: str = one_of("auto", *ISAS)
    threads: int = 0
    arch: str = "auto"

    def __post_init__(self) -> None:
        check_choices("target", self)
        if self.threads < 0:
            raise ConfigError(f"target.threads is {self.threads}; it must be 0 (automatic) or more")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
        max_num_seqs: requests in one step.
        max_num_batched_tokens: tokens in one step (also the largest prefill chunk).
        enable_chunked_prefill: False refuses prompts larger than the token budget.
        target_step_ms: while answers are being written, a step takes as many prompt tokens as fit
            into this time, or into twice the time of a step without any if that is more; 0 sets no
            limit, for throughput. `girih serve` sets 100.
        long_prefill_token_threshold: while answers are being written, each prompt takes at most
            this many tokens per step; 0 sets no limit.
        policy: "fcfs" or "priority".
        max_num_waiting: requests that may queue; 0 means no limit.
        max_waiting_tokens: prompt tokens of queued requests together; 0 means no limit.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    enable_chunked_prefill: bool = True
    target_step_ms: float = 0.0
    long_prefill_token_threshold: int = 0
    policy: str = one_of("fcfs", "priority")
    max_num_waiting: int = 0
    max_waiting_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"scheduler.{name}", value, "at least 1")
        check_choices("scheduler", self)
        for name in ("long_prefill_token_threshold", "max_num_waiting", "max_waiting_tokens"):
            value = getattr(self, name)
            require(value >= 0, f"scheduler.{name}", value, "0 or more")
        require(
            0 <= self.target_step_ms < math.inf,
            *("scheduler.target_step_ms", self.target_step_ms, "0 (no limit) or more"),
        )


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        block_size: token slots per block (a multiple of 16).
        num_blocks: blocks in the pool; None sizes the pool from memory.
        kv_cache_bytes: budget in bytes; None takes `memory_fraction` of the free memory.
        memory_fraction: share of the free memory, in (0, 1].
        enable_prefix_caching: keep and reuse blocks of equal prefixes.
        kv_dtype: "auto" is the model's; "int8" takes half of bfloat16's memory, with a scale per
            token and head (see the README for what it costs).
    """

    block_size: int = 32
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float = 0.4
    enable_prefix_caching: bool = True
    kv_dtype: str = one_of(*KV_DTYPES)

    def __post_init__(self) -> None:
        if self.kv_dtype.startswith("fp8"):
            raise ConfigError(
                f"cache.kv_dtype is {self.kv_dtype!r}; fp8 is for GPUs; it must be one of "
                f"{', '.join(KV_DTYPES)}"
            )
        check_choices("cache", self)
        size, blocks, share = self.block_size, self.num_blocks, self.memory_fraction
        is_multiple = size >= 16 and size % 16 == 0
        require(is_multiple, "cache.block_size", size, "a positive multiple of 16")
        allowed = "at least 2 (block 0 is the null block)"
        require(blocks is None or blocks >= 2, "cache.num_blocks", blocks, allowed)
        require(0 < share <= 1, "cache.memory_fraction", share, "in (0, 1]")


@dataclass(frozen=True)
class CompileConfig:
    """Where compiled bundles live, and who waits for them.

    Attributes:
        mode: "wait" compiles before the first request; "background" answers with eager pieces at
            once and takes in each tile when it is ready.
        bundle: directory of one bundle; None looks in the cache by key, and compiles on a miss.
        bundle_missing: "error" refuses to start when `bundle` is not there or damaged, "build"
            makes it; `girih compile` always does.
        reuse: `bundle` may be made as a copy of one in the cache that has the same key.
        cache_gib: after a build, cached bundles used longest ago go until the rest fits.
    """

    mode: str = one_of("wait", "background")
    bundle: str | None = None
    bundle_missing: str = one_of("error", "build")
    reuse: bool = True
    cache_gib: float = 20.0

    def __post_init__(self) -> None:
        check_choices("compile", self)
        require(self.cache_gib >= 0, "compile.cache_gib", self.cache_gib, "0 or more")


@dataclass(frozen=True)
class RuntimeConfig:
    """Where the core runs, and how its steps follow each other.

    Attributes:
        process: "inline" keeps the core in the caller's process, "process" gives it its own.
        async_scheduling: plan the next step while one runs; the tokens are the same.
        trace: file for what every step did, as Chrome trace events; None writes none.
        profile_dir: folder for what /admin/profile/start records; null refuses to profile.
        logits_processors: plug-ins that change logits, as "module:Class", beside those of installed
            packages (entry points `girih.logits_processors`).
        batch_invariant: refuse to start unless the same request gives the same bits (tokens and
            log-probabilities) whatever else is in the batch.
        status_seconds: between log lines of a serving engine that is busy; 0 logs none.
        restart: "never", or "on-failure": a core process that died is started again (requests
            without a token are handed over anew, the others end with an error).
        replay: steps that run as captured before, padded to a bucket: "full" (all of a step with
            one token per request, else piecewise), "piecewise" (all but attention and head),
            "none"; "auto" is what pays on the device.
        replay_tokens: buckets of "piecewise" in tokens, growing; empty derives them from
            scheduler.max_num_batched_tokens.
        replay_requests: buckets of "full" in requests, growing; empty derives them from
            scheduler.max_num_seqs.
    """

    process: str = one_of("inline", "process")
    async_scheduling: bool = True
    trace: str | None = None
    profile_dir: str | None = None
    logits_processors: tuple[str, ...] = ()
    batch_invariant: bool = False
    status_seconds: float = 10.0
    restart: str = one_of("never", "on-failure")
    replay: str = one_of("auto", "none", "piecewise", "full")
    replay_tokens: tuple[int, ...] = ()
    replay_requests: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choices("runtime", self)
        for name in ("replay_tokens", "replay_requests"):
            sizes = list(getattr(self, name))
            grows = all(a < b for a, b in pairwise((0, *sizes)))
            require(grows, f"runtime.{name}", sizes, "positive numbers that grow")
        seconds = self.status_seconds
        require(seconds >= 0, "runtime.status_seconds", seconds, "0 (off) or more")
        if self.restart != "never" and self.process == "inline":
            raise ConfigError(
                "runtime.restart=on-failure needs runtime.process=process: a core inside the "
                "caller's process cannot be started again"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    opt: OptConfig = field(default_factory=OptConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
