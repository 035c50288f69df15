"""A module of a model that runs as transformers wrote it, between compiled tiles.

`girih::eager_module(inputs, weights, module, outputs, source, dim) -> results`
    Calls the module registered under the name `module` with tensors and its own weights. `outputs`
    describes the results, "float32[1,T,64] float32[T,4]", where T is `inputs[source].shape[dim]`:
    the number of tokens. Results are contiguous and share no memory with what is passed.

The op has no code of its own: `register_eager_module` gives a name its function, in the process
that traced the model or opened its bundle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from girih.kernels.base.errors import EngineError

EagerFn = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]

_functions: dict[str, EagerFn] = {}
_library = torch.library.Library("girih", "FRAGMENT")
_library.define(
    "eager_module(Tensor[] inputs, Tensor[] weights, str module, str outputs, int source, int dim)"
    " -> Tensor[]"
)


def register_eager_module(name: str, function: EagerFn) -> None:
    """Have calls of the module `name` run `function` (inputs, weights) -> results."""
    _functions[name] = function


def eager_module(name: str) -> EagerFn:
    """The function of a module.

    Raises:
        EngineError: nothing is registered under this name.
    """
    try:
        return _functions[name]
    except KeyError:
        raise EngineError(
            f"the module {name} runs eagerly, and nobody has built it in this process: open its "
            "bundle, or trace its model"
        ) from None


def _run(
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    module: str,
    outputs: str,
    source: int,
    dim: int,
) -> list[torch.Tensor]:
    results = eager_module(module)(inputs, weights)
    taken = {t.untyped_storage().data_ptr() for t in (*inputs, *weights)}
    return [r.clone() if r.untyped_storage().data_ptr() in taken else r for r in results]


_library.impl("eager_module", _run, "CPU")
_library.impl("eager_module", _run, "CUDA")


@torch.library.register_fake("girih::eager_module", lib=_library)
def _fake(
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    module: str,
    outputs: str,
    source: int,
    dim: int,
) -> list[torch.Tensor]:
    tokens = inputs[source].shape[dim]
    return [
        inputs[source].new_empty(
            [tokens if size == "T" else int(size) for size in sizes.split(",")],
            dtype=getattr(torch, dtype),
        )
        for dtype, sizes in re.findall(r"(\w+)\[([^\]]*)\]", outputs)
    ]
