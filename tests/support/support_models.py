"""Tiny random Hugging Face models on disk: config, safetensors and a byte-level tokenizer.

Every model is written once per session (seeded, so equal in every process) and cached.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import support_tokenizer
import torch

from girih.graph.files.spec import ModelSpec, load_spec
from girih.graph.partition.partition import Program
from girih.graph.trace.trace import Traced, trace
from girih.kernels.base.target import Target, detect_isa
from girih.passes.build.build import lower_and_partition
from girih.passes.options import OptConfig
from girih.passes.pipeline import PIPELINE

VOCAB = 424  # the tokenizer's 421 tokens, rounded up

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}

# Settings of each kind of model beside SMALL, by transformers' model_type.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
    },
    "qwen2": {},
    "gpt2": {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
}


def hf_config(kind: str, **changes: Any) -> Any:
    """The transformers config of a tiny model."""
    from transformers import AutoConfig

    settings = {**SMALL, **KINDS.get(kind, {}), **changes}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    return AutoConfig.for_model(kind, **settings)


def hf_model(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model with enough spread in its weights that greedy tokens vary."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "embed" in name or "norm" in name else 0.25
            parameter.normal_(0.0, scale)
            if "norm" in name:
                parameter.add_(1.0)
    model.tie_weights()
    return model.eval()


def write_hf(path: Path, config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model and the tokenizer to `path`."""
    from transformers import GenerationConfig

    model = hf_model(config, seed, dtype)
    model.generation_config = GenerationConfig(eos_token_id=SMALL["eos_token_id"])
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(support_tokenizer._trained_byte_level())
    return path


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="girih-models-")


@functools.cache
def _written(kind: str, seed: int, dtype: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_root().name)) / "model"
    config = hf_config(kind, **{k: _thawed(v) for k, v in changes})
    return write_hf(path, config, seed, getattr(torch, dtype))


def tiny_model(kind: str, seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """Directory of a tiny random model, written on first use.

    Args:
        kind: transformers' model_type, e.g. "llama".
        seed: of the weights.
        dtype: of the weights.
        changes: config settings that differ from `SMALL` and `KINDS`.
    """
    frozen = tuple(sorted((k, _frozen(v)) for k, v in changes.items()))
    return _written(kind, seed, dtype, frozen)


def tiny_spec(kind: str, **changes: Any) -> ModelSpec:
    """Spec of a tiny model."""
    return load_spec(str(tiny_model(kind, **changes)))


@functools.cache
def _traced(path: Path) -> Traced:
    return trace(load_spec(str(path)))


def tiny_traced(kind: str, **changes: Any) -> Traced:
    """A tiny model traced, once per session; treat as read-only."""
    return _traced(tiny_model(kind, **changes))


def opt_o2() -> OptConfig:
    """Every pass on."""
    opt = OptConfig()
    for name in PIPELINE:
        getattr(opt.passes, name).enabled = True
    return opt


def program_of(traced: Traced, isa: str | None = None) -> Program:
    """A traced model lowered with every pass and split into tiles."""
    return lower_and_partition(traced, opt_o2(), Target("cpu", isa or detect_isa(), 2, "g++"))[1]


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return ("list", *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, _frozen(v)) for k, v in value.items()))
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("list",):
        return [_thawed(v) for v in value[1:]]
    if isinstance(value, tuple) and value[:1] == ("dict",):
        return {k: _thawed(v) for k, v in value[1:]}
    return value
