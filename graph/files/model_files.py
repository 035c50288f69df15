"""transformers' own reading and writing of a model's directory, for what compares with it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from girih.graph.files.spec import ModelSpec
from girih.kernels.base.errors import TraceError


def model_settings(spec: ModelSpec) -> Any:
    """transformers' configuration object of a model.

    Raises:
        TraceError: this transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(spec.files.path, local_files_only=True)
    except (ValueError, KeyError, ImportError) as error:
        raise TraceError(f"transformers does not know {spec.architecture}: {error}") from error


def save_model(model: torch.nn.Module, directory: Path) -> None:
    """Write a checkpoint as transformers does, without its progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(directory)  # type: ignore[operator]
    finally:
        if shown:
            logging.enable_progress_bar()
