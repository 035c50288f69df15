"""State shared by the stages of a start (configuration, model, target), and its report."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from girih.graph.bundle.bundle import BundleOrigin
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.verify_result import VerifyResult, verify_report
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress
from girih.kernels.base.seconds import timed
from girih.kernels.base.target import Target, resolve_target
from girih.passes.build.build import Place
from girih.runtime.engine.core import PLANS_IN_FLIGHT
from girih.runtime.records.config import EngineConfig
from girih.runtime.start.wanted import model_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartReport:
    """The course of a start.

    Attributes:
        bundle: where the code comes from.
        seconds: per stage.
        memory: what the executable owns, for people.
        attention: backend taken, and why others were not.
        verified: the rows, where this start traced the model, and the canary of compiled code.
    """

    bundle: BundleOrigin
    seconds: dict[str, float]
    memory: str
    attention: str
    verified: tuple[VerifyResult, ...]

    def as_text(self) -> str:
        """A few lines for the log."""
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        verified = verify_report(self.verified)
        return f"bundle {self.bundle.as_text()}\n{parts}\n{verified}{self.attention}\n{self.memory}"


@dataclass(frozen=True)
class Start:
    """One start of an engine.

    Attributes:
        config: what was asked for.
        spec: the model.
        target: what is compiled for, and runs.
        progress: observer of long work.
        seconds: what reading the model took.
    """

    config: EngineConfig
    spec: ModelSpec
    target: Target
    progress: Progress
    seconds: dict[str, float]

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        wanted = self.config.cache.kv_dtype
        dtype: torch.dtype = getattr(torch, self.spec.dtype if wanted == "auto" else wanted)
        return dtype

    @property
    def model_length(self) -> int:
        """Longest request in tokens, as far as the model has a say in it.

        Raises:
            ConfigError: more was asked for than the model was made for.
            SourceError: nothing was asked for, and its files name no limit.
        """
        wanted = self.config.model.max_model_len
        if wanted is None or isinstance(wanted, str):
            return self.spec.usual_length
        longest = self.spec.max_position
        if longest is not None and wanted > longest:
            kinds = ", ".join(self.spec.rotary.kinds)
            raise ConfigError(
                f"model.max_model_len is {wanted}; {self.spec.name} was made for at most "
                f"{longest} tokens" + (f" (rotary embedding: {kinds})" if kinds else "")
            )
        return wanted

    @property
    def bundle_place(self) -> Place:
        """Where its bundle is."""
        settings = self.config.compile
        return Place(
            settings.bundle,
            may_build=settings.bundle_missing == "build",
            may_copy=settings.reuse,
            cache_bytes=int(settings.cache_gib * 2**30),
        )

    def require_facts(self) -> None:
        """Refuse a model whose files lack what an engine has to know, before anything is built.

        Raises:
            SourceError, ConfigError: as `model_length`, and as the facts of a `ModelSpec`.
        """
        _ = self.model_length, self.spec.vocab_size, self.spec.eos_token_ids

    @property
    def lookahead(self) -> int:
        """Tokens of one request in plans whose result is not there, at most."""
        plans = PLANS_IN_FLIGHT if self.config.runtime.async_scheduling else 1
        return plans * self.config.scheduler.max_num_batched_tokens


def start_of(config: EngineConfig, progress: Progress = no_progress) -> Start:
    """Read what the model is, and resolve the target.

    Raises:
        SourceError, ConfigError: as `model_spec` and `target_of`.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "spec"):
        spec = model_spec(config.model, progress)
    progress(ProgressEvent("model", 1, 1, spec.name, str(spec.files.path)))
    short = spec.rotary.short_length
    if short is not None and not spec.has_short_factors:
        logger.warning(
            "%s: every sequence gets the long rotary factors (longrope), also those of up to %d "
            "tokens, which transformers computes with the short ones; start with "
            "model.max_model_len=%d where no longer ones are needed",
            *(spec.name, short, short),
        )
    return Start(config, spec, target_of(config), progress, seconds)


def target_of(config: EngineConfig) -> Target:
    """The configured target; its thread count is set for this thread."""
    wanted = config.target
    target = resolve_target(wanted.device, wanted.isa, wanted.threads, wanted.arch)
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    return target
