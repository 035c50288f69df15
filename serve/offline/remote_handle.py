"""An engine in another process as an `EngineHandle` of this one."""

from __future__ import annotations

import weakref
from pathlib import Path

from girih.kernels.base.progress import Progress
from girih.runtime.client.core_process import Build
from girih.runtime.client.remote_core import RemoteCore
from girih.runtime.records.messages import EngineFacts


class RemoteHandle:
    """Starts an engine in a process of its own; that process ends with this object.

    Args:
        build: makes the engine there; it must be picklable.
        progress: observer of the start-up work.

    Raises:
        GirihError: what building raised.
    """

    def __init__(self, build: Build, progress: Progress) -> None:
        self._core = RemoteCore(build, progress)
        weakref.finalize(self, self._core.close)

    @property
    def core(self) -> RemoteCore:
        """Takes requests and makes steps."""
        return self._core

    @property
    def model_path(self) -> Path:
        """Directory with the tokenizer and generation_config.json."""
        return Path(self._core.facts.model_path)

    @property
    def name(self) -> str:
        """What to call the model."""
        return self._core.facts.name

    @property
    def key(self) -> str:
        """The bundle's key."""
        return self._core.facts.key

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self._core.facts.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._core.facts.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        return self._core.facts.eos_token_ids

    @property
    def facts(self) -> EngineFacts:
        """All of these, and the model's task."""
        return self._core.facts
