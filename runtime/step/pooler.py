"""From rows of a model's output to the vectors that requests asked for.

    rows [S, W] ─▶ linear layers ─▶ cut ─▶ activation ─▶ float32

Everything here is float32, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from girih.graph.files.spec import ModelSpec
from girih.graph.files.task import DenseLayer
from girih.kernels.base.errors import SourceError
from girih.runtime.records.pooling_params import PoolingFacts, PoolingParams

Activation = str


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out], or None.
        uses_tanh: whether tanh follows.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    uses_tanh: bool

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [S, in] -> [S, out]."""
        out = torch.nn.functional.linear(rows, self.weight, self.bias)
        return out.tanh() if self.uses_tanh else out


@dataclass(frozen=True)
class Pooler:
    """Finishes rows.

    Attributes:
        mode: which rows of a text are wanted: "last", "cls", "mean" (the last one of the running
            mean) or "all".
        activation: by default: "normalize", "softmax", "sigmoid" or "identity".
        on_demand: for a request that asks for one.
        layers: run first.
    """

    mode: str
    activation: Activation = "identity"
    on_demand: Activation = "identity"
    layers: Sequence[Dense] = field(default=())

    def finish(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the model [S, W] in float32, behind the linear layers."""
        rows = rows.float()
        for layer in self.layers:
            rows = layer.run(rows)
        return rows

    def apply(self, rows: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Apply a request's parameters to its finished rows [n, W]."""
        if params.dimensions is not None:
            rows = rows[:, : params.dimensions]
        name = self.activation
        if params.use_activation is not None:
            name = self.on_demand if params.use_activation else "identity"
        return _ACTIVATIONS[name](rows)


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda rows: rows,
    "normalize": lambda rows: torch.nn.functional.normalize(rows, dim=-1),
    "sigmoid": torch.sigmoid,
    "softmax": lambda rows: rows.softmax(-1),
}


def make_pooler(spec: ModelSpec, is_bidirectional: bool, width: int) -> Pooler:
    """Return the pooler of a model.

    Args:
        spec: the model.
        is_bidirectional: whether tokens see later ones.
        width: values per row of the model.
    """
    assert spec.pooling is not None
    activation = activation_of(spec, width)
    return Pooler(
        spec.pooling.resolved(is_bidirectional),
        activation,
        "normalize" if spec.task == "embed" else activation,
        read_layers(spec.files.path, spec.pooling.layers),
    )


def read_layers(path: Path, layers: Sequence[DenseLayer]) -> list[Dense]:
    """Load the linear layers that sentence-transformers keeps beside a model.

    Raises:
        SourceError: a file does not hold one.
    """
    loaded = []
    for layer in layers:
        file = path / layer.folder / "model.safetensors"
        tensors = load_file(file)
        if "linear.weight" not in tensors:
            raise SourceError(f"{file} holds no linear.weight")
        bias = tensors.get("linear.bias")
        loaded.append(
            Dense(
                tensors["linear.weight"].float(),
                None if bias is None else bias.float(),
                layer.activation == "tanh",
            )
        )
    return loaded


def activation_of(spec: ModelSpec, width: int) -> Activation:
    """Return the default activation for a vector of `width` values.

    Embeddings are normalised as the model's files say. Of a classifier, the activation named for
    sentence-transformers wins, then `problem_type`; without either one label gets a sigmoid and
    several a softmax.
    """
    assert spec.pooling is not None
    if spec.task == "embed":
        return "normalize" if spec.pooling.normalize else "identity"
    named = _named_activation(spec.config)
    if named is not None:
        return named
    known = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    said = str(spec.config.get("problem_type"))
    if said == "single_label_classification" and width == 1:
        return "sigmoid"
    return known.get(said, "sigmoid" if width == 1 else "softmax")


def _named_activation(config: dict[str, Any]) -> Activation | None:
    nested = config.get("sentence_transformers")
    name = nested.get("activation_fn") if isinstance(nested, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    kind = str(name).rpartition(".")[2].lower() if name else None
    if kind is not None and kind not in ("identity", "sigmoid", "softmax"):
        raise SourceError(f"the model names the activation {name!r}; known are Identity, Sigmoid "
                          "and Softmax")  # fmt: skip
    return kind


def labels_of(spec: ModelSpec, width: int) -> tuple[str, ...]:
    """Names of a classifier's values, in order."""
    named = spec.config.get("id2label")
    names = named if isinstance(named, dict) else {}
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(width))


def pooling_facts(
    spec: ModelSpec, pooler: Pooler, width: int, can_cut: bool | None = None
) -> PoolingFacts:
    """Return the pooling facts for front ends.

    Args:
        spec: the model.
        pooler: finishes its rows.
        width: values per row of the model.
        can_cut: whether embeddings may be cut; None goes by the model's files.
    """
    assert spec.pooling is not None
    embeds = spec.task == "embed"
    may_cut = spec.pooling.is_matryoshka if can_cut is None else can_cut
    return PoolingFacts(
        mode=pooler.mode,
        width=pooler.layers[-1].weight.shape[0] if pooler.layers else width,
        activation=pooler.activation,
        has_token_types=spec.has_token_types,
        can_cut=embeds and may_cut,
        dimensions=spec.pooling.dimensions if embeds else (),
        labels=() if embeds else labels_of(spec, width),
    )
