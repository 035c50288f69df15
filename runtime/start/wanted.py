"""The model and the bundle key that a configuration requests. Needs no torch."""

from __future__ import annotations

from girih.graph.bundle.files import BundleKey
from girih.graph.files.spec import ModelSpec, load_spec
from girih.kernels.base.progress import Progress, no_progress
from girih.kernels.base.target import resolve_target
from girih.passes.build.key import bundle_key
from girih.runtime.records.config import EngineConfig, ModelConfig


def model_spec(model: ModelConfig, progress: Progress = no_progress) -> ModelSpec:
    """Read what the configured model is.

    Raises:
        SourceError, ConfigError: as `load_spec`.
    """
    longest = model.max_model_len if isinstance(model.max_model_len, int) else None
    return load_spec(model.source, model.dtype, progress, model.task, model.pooling, longest)


def key_of(config: EngineConfig, progress: Progress = no_progress) -> BundleKey:
    """The key of the bundle that a configuration needs; traces nothing."""
    spec, wanted = model_spec(config.model, progress), config.target
    # Bundles serve any number of threads, so torch need not be asked for its own.
    target = resolve_target(wanted.device, wanted.isa, wanted.threads or 1, wanted.arch)
    return bundle_key(spec, config.opt, target)
