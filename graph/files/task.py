"""Reads a model's task and pooling from its files.

    generate   the next token, from the logits of the last one
    embed      one vector for a text, from the hidden states of its tokens
    classify   one value per label, from a head on a hidden state (scores: a head with one label)

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.graph.files.sources import read_json, whole_number
from girih.kernels.base.errors import ConfigError, SourceError

TASKS = ("generate", "embed", "classify")
POOLINGS = ("last", "cls", "mean", "all")
# Models whose positions start behind the padding token's id, which costs them as many.
POSITIONS_BEHIND_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod", "mpnet", "data2vec-text"),
    *("roberta-prelayernorm", "ibert", "luke", "longformer", "esm"),
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer behind the pooling, in a folder of its own.

    Attributes:
        folder: where its weights are, relative to the model.
        activation: "identity" or "tanh".
    """

    folder: str
    activation: str


@dataclass(frozen=True)
class Pooling:
    """The steps from the hidden states of a text to the result.

    Attributes:
        mode: "last" or "cls": the hidden state of the last or first token; "mean": of all tokens;
            "all": one vector per token; "auto": "cls" where tokens see later ones, else "last".
        normalize: embeddings get length 1.
        layers: linear layers between pooling and normalising.
        max_tokens: longest text its makers meant; None leaves it to the model.
        dimensions: lengths to which an embedding may be cut; () for any below its own.
        is_matryoshka: embeddings may be cut.
    """

    mode: str = "auto"
    normalize: bool = True
    layers: tuple[DenseLayer, ...] = ()
    max_tokens: int | None = None
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False

    def resolved(self, is_bidirectional: bool) -> str:
        """The mode, given whether tokens see later ones."""
        if self.mode != "auto":
            return self.mode
        return "cls" if is_bidirectional else "last"


def choose_task(architecture: str, path: Path, wanted: str = "auto") -> str:
    """Choose the task of a model.

    Args:
        architecture: class name in transformers.
        path: its directory; one made by sentence-transformers embeds.
        wanted: one of `TASKS`, or "auto".

    Raises:
        ConfigError: the model has no head for the task.
    """
    classifies = "ForSequenceClassification" in architecture
    if wanted == "auto":
        if classifies:
            return "classify"
        if (path / "modules.json").exists():
            return "embed"
        is_base = architecture.endswith(("Model", "ForMaskedLM")) and "LMHead" not in architecture
        return "embed" if is_base else "generate"
    if wanted not in TASKS:
        raise ConfigError(f"model.task is {wanted!r}; it must be auto, {', '.join(TASKS)}")
    if (wanted == "classify") != classifies:
        own = "classifies" if classifies else "has no head that classifies"
        raise ConfigError(
            f"model.task is {wanted!r}, but {architecture} {own}; use model.task=auto"
        )
    return wanted


def read_pooling(config: Mapping[str, Any], path: Path, task: str, mode: str = "auto") -> Pooling:
    """Read the pooling of a model.

    Args:
        config: its `config.json`.
        path: its directory, where sentence-transformers describes pooling in files of its own.
        task: "embed" or "classify".
        mode: one of `POOLINGS` instead of what the files say, or "auto".

    Raises:
        ConfigError: `mode` is unknown, or set for a model whose head decides.
        SourceError: the files ask for something else than what is known here.
    """
    if mode not in ("auto", *POOLINGS):
        raise ConfigError(f"model.pooling is {mode!r}; it must be auto, {', '.join(POOLINGS)}")
    if task == "classify":
        if mode != "auto":
            raise ConfigError(
                f"model.pooling is {mode!r}, but a classifier's head decides how it pools; leave it"
            )
        return _pooling_of_head(config, path)
    found = _sentence_pooling(path)
    own = found.mode if mode == "auto" else mode
    lengths = tuple(config.get("matryoshka_dimensions") or ())
    can_cut = bool(config.get("is_matryoshka") or lengths)
    return Pooling(own, found.normalize, found.layers, found.max_tokens, lengths, can_cut)


def _pooling_of_head(config: Mapping[str, Any], path: Path) -> Pooling:
    said = config.get("classifier_pooling")
    if said not in (None, "cls", "bos", "mean"):
        raise SourceError(f"{path.name} pools for its head by {said!r}; known are cls and mean")
    return Pooling("mean" if said == "mean" else "auto", normalize=False)


def _sentence_pooling(path: Path) -> Pooling:
    """Read the pooling from sentence-transformers' files: a list of modules, each with a folder."""
    if not (path / "modules.json").exists():
        return Pooling()
    mode, normalize, layers = "mean", False, []
    for module in _modules(path / "modules.json"):
        kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Pooling":
            mode = _pooling_mode(path / folder / "config.json")
        elif kind == "Dense":
            layers.append(_dense_layer(path, folder))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise SourceError(
                f"{path.name}: modules.json asks for {kind!r}; known are Transformer, Pooling, "
                "Dense and Normalize"
            )
    limits = path / "sentence_bert_config.json"
    said = read_json(limits) if limits.exists() else {}
    longest = whole_number(said, "max_seq_length", limits)
    return Pooling(mode, normalize, tuple(layers), longest)


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {file} as JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise SourceError(f"{file} must hold a list of objects")
    return modules


_MODES = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean",
          "lasttoken": "last"}  # fmt: skip


def _pooling_mode(file: Path) -> str:
    if not file.exists():
        raise SourceError(f"{file} is missing: how the model pools is not known")
    config = read_json(file)
    said = config.get("pooling_mode")
    chosen = [said] if isinstance(said, str) else [
        name.removeprefix("pooling_mode_")
        for name, is_on in config.items()
        if name.startswith("pooling_mode_") and is_on is True
    ]  # fmt: skip
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise SourceError(
            f"{file} pools by {' and '.join(chosen) or 'nothing'}; known are cls_token, "
            "mean_tokens and lasttoken, one at a time"
        )
    return _MODES[chosen[0]]


def _dense_layer(path: Path, folder: str) -> DenseLayer:
    config = read_json(path / folder / "config.json")
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2].lower()
    if activation not in ("identity", "tanh"):
        raise SourceError(f"{path.name}/{folder} has the activation {activation!r}; known are "
                          "identity and tanh")  # fmt: skip
    if not (path / folder / "model.safetensors").exists():
        raise SourceError(f"{path.name}/{folder} holds no model.safetensors")
    return DenseLayer(folder, activation)
