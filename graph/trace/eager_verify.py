"""Level "modules": a module is a function of single tokens, verified by running it.

In float32, a token alone, some of them, and in another order must give what it gives in a batch;
the result must not depend on what was called before, and nothing that is passed may be written to.
Rows of very different size are in the batch, so that a threshold on values is met from both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from girih.graph.ir.trace_lock import trace_lock
from girih.graph.trace.call_form import PLAIN_TYPES, CallForm, TensorForm, Unfit

_ROWS = 12
# Rows alone, some of them, and all in another order.
_SUBSETS = [*([n] for n in range(_ROWS)), [0, 1, 2, 3, 4], [11, 9, 7, 5], [*range(_ROWS)][::-1]]
_TOLERANCE = 1e-4


class _Tensor:
    """Stands where a result has a tensor."""


TENSOR = _Tensor()


def verify_module(
    model: torch.nn.Module, module: torch.nn.Module, names: tuple[str, ...], form: CallForm
) -> tuple[str, Any, tuple[Any, ...]]:
    """Run a module on random weights and small inputs, in batches and alone.

    Returns:
        The op's `outputs`, and structure and leaves of the module's result.
    """
    weights = _random_weights(model, module, names)
    call = as_function(copy.deepcopy(module), names)
    in_float = [w.float() if w.is_floating_point() else w for w in weights]
    batch = [_random_input(t, number) for number, t in enumerate(form.tensors)]

    def run(rows: list[int]) -> list[torch.Tensor]:
        return _tensors(_called(call, form, _rows_of(batch, form, rows), in_float))

    everything = list(range(_ROWS))
    expected, fewer = run(everything), run(everything[:5])
    shapes = [_shape(a, b) for a, b in zip(expected, fewer, strict=True)]
    for rows in (*_SUBSETS, everything):
        for whole, part, shape in zip(expected, run(rows), shapes, strict=True):
            _require_alike(whole, part, shape.index("T"), rows)
    own = [x.to(getattr(torch, t.dtype)) for x, t in zip(batch, form.tensors, strict=True)]
    leaves, tree = pytree.tree_flatten(_called(call, form, own, weights))
    dtypes = [str(x.dtype).removeprefix("torch.") for x in _tensors(leaves)]
    outputs = " ".join(f"{d}[{','.join(s)}]" for d, s in zip(dtypes, shapes, strict=True))
    plain = [TENSOR if isinstance(x, torch.Tensor) else _plain_result(x) for x in leaves]
    return outputs, tree, tuple(plain)


def _called(call: Any, form: CallForm, inputs: list[torch.Tensor], weights: Any) -> Any:
    before = [x.clone() for x in inputs]
    try:
        result = call(form, inputs, weights)
    except Exception as error:
        raise Unfit(f"does not run by itself: {first_line(error)}") from error
    if not all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)):
        raise Unfit("writes to what it is called with")
    return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _plain_result(value: Any) -> Any:
    if not isinstance(value, PLAIN_TYPES):
        raise Unfit(f"returns a {type(value).__name__}")
    return value


def _shape(whole: torch.Tensor, fewer: torch.Tensor) -> list[str]:
    """The shape of a result in words, "T" where it follows the number of tokens."""
    sizes = list(zip(whole.shape, fewer.shape, strict=False))
    shape = ["T" if a != b else str(a) for a, b in sizes]
    if whole.ndim != fewer.ndim or [s for s in sizes if s[0] != s[1]] != [(_ROWS, 5)]:
        raise Unfit(f"returns {list(whole.shape)} for {_ROWS} tokens, not one row for each")
    return shape


def _require_alike(whole: torch.Tensor, part: torch.Tensor, dim: int, rows: list[int]) -> None:
    wanted = whole.index_select(dim, torch.tensor(rows))
    if part.shape == wanted.shape:
        a, b = (x.double().movedim(dim, 0).flatten(1) for x in (part, wanted))
        scale = b.abs().amax(1, keepdim=True)
        alike = ((a - b).abs() <= _TOLERANCE * scale + 1e-9) | (a.isnan() & b.isnan()) | (a == b)
        if bool(alike.all()):
            return
    raise Unfit("does not give a token alone what it gives it among others")


def _random_input(form: TensorForm, number: int) -> torch.Tensor:
    """Float32 values; tokens are of very different size, 0.01 to 100."""
    generator = torch.Generator().manual_seed(number)
    shape = [_ROWS if size is None else size for size in form.shape]
    dtype = getattr(torch, form.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    values = torch.randn(shape, generator=generator)
    if form.dim is None:
        return values
    sizes = torch.logspace(-2, 2, _ROWS)[torch.arange(_ROWS) * 5 % _ROWS]
    return values * sizes.view([-1 if d == form.dim else 1 for d in range(values.ndim)])


def _rows_of(batch: list[torch.Tensor], form: CallForm, rows: list[int]) -> list[torch.Tensor]:
    index = torch.tensor(rows)
    return [
        x.clone() if t.dim is None else x.index_select(t.dim, index)
        for x, t in zip(batch, form.tensors, strict=True)
    ]


def _random_weights(
    model: torch.nn.Module, module: torch.nn.Module, names: tuple[str, ...]
) -> list[torch.Tensor]:
    """Parameters of a trained model's size; buffers as the model's own code makes them."""
    owner = _owner(model, module)
    real = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.zero_()
        for part in real.modules():
            owner._init_weights(part)  # type: ignore[operator]
        for parameter in real.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return [tensor_of(real, name).detach() for name in names]


def _owner(model: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """The innermost part of transformers' own around a module: it knows how to begin."""
    parts = [p for p in model.modules() if hasattr(p, "_init_weights")]
    return [p for p in parts if any(inner is module for inner in p.modules())][-1]


def as_function(
    module: torch.nn.Module, names: tuple[str, ...]
) -> Callable[[CallForm, Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]:
    """A module on the meta device as a function of its tensors; one call runs at a time."""
    module = module.eval()

    def call(
        form: CallForm, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> Any:
        args, kwargs = form.arguments(inputs)
        tensors = dict(zip(names, weights, strict=True))
        with trace_lock, torch.no_grad():  # the tensors are in the module while it runs
            return torch.func.functional_call(module, tensors, args, kwargs)

    return call


def tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of a name with dots."""
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
