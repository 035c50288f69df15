"""Modules that cannot be captured: each stays as transformers wrote it, as a step of its own.

Tracing fails inside a module whose Python looks at values (`if x.max() > 4:`, a loop over
`.tolist()`). The smallest module around that place which is a function of single tokens is then
called through `girih::eager_module`, its weights named in the graph like all others, and tracing
starts again; everything around it compiles.

    failure ─▶ open calls, innermost first ─▶ run alone on small inputs ─▶ its class stands aside

What may stand aside is found by running it in float32 on random weights: a token alone, some of
them, and in another order must give what it gives in a batch; the result must not depend on what
was called before, and nothing that is passed may be written to. A module with attention, a cache or
positions inside fails this, and the model is refused. Rows of very different size are in the batch,
so that a threshold on values is met from both sides; a test it stays, not a proof.

Modules that compute alike share one function, which is called with their own weights.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.utils._pytree as pytree

from girih.graph.program import EagerSpec, ProgramLayout
from girih.graph.stamp import fingerprint
from girih.kernels.eager_ops import register_eager_module
from girih.kernels.errors import BundleError, TraceError

_PLAIN_TYPES = (bool, int, float, str, type(None))
_ROWS = 12
# Rows alone, some of them, and all in another order.
_SUBSETS = [*([n] for n in range(_ROWS)), [0, 1, 2, 3, 4], [11, 9, 7, 5], [*range(_ROWS)][::-1]]
_TOLERANCE = 1e-4
_NUMBER_NAMES = ("layer_idx", "layer_id", "layer_index")

_specs: dict[str, EagerSpec] = {}


def eager_spec(name: str) -> EagerSpec:
    """The module that a `girih::eager_module` call names."""
    return _specs[name]


def build_eager_modules(layout: ProgramLayout, build: Callable[[], torch.nn.Module]) -> None:
    """Make a bundle's eager modules callable, without tracing.

    Args:
        layout: the program of a bundle.
        build: builds transformers' model without weights; not called when nothing is eager.

    Raises:
        BundleError: this version of transformers has no such module.
    """
    if not layout.eager_specs:
        return
    model = build()
    for spec in layout.eager_specs:
        try:
            module = model.get_submodule(spec.path)
        except AttributeError as error:
            raise BundleError(f"the model has no module {spec.path}: {error}") from error
        found = (type(module).__name__, _tensor_names(module))
        if found != (spec.kind, spec.weights):
            raise BundleError(
                f"the bundle runs {spec.path} eagerly as {spec.kind} with {', '.join(spec.weights)}"
                f"; transformers builds {found[0]} with {', '.join(found[1])}"
            )
        _register(spec, module)


@dataclass(frozen=True)
class _TensorForm:
    """A tensor argument: its dtype, and its shape with None where tokens are counted."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def dim(self) -> int | None:
        """The dimension of tokens."""
        return self.shape.index(None) if None in self.shape else None


@dataclass(frozen=True)
class CallForm:
    """How a module is called: the structure of its arguments, tensors left open.

    Attributes:
        tree: of (positional, named) arguments.
        leaves: plain values, and forms of tensors.
    """

    tree: str
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[_TensorForm]:
        """The tensor arguments in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _TensorForm)]

    @property
    def source(self) -> tuple[int, int]:
        """The first tensor with tokens, and its dimension of them."""
        return next((i, t.dim) for i, t in enumerate(self.tensors) if t.dim is not None)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments with `tensors` in their places."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, _TensorForm) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(self.tree))
        return args, kwargs

    def as_text(self) -> str:
        """JSON, for a bundle."""
        leaves = [
            {"tensor": [x.dtype, x.shape]} if isinstance(x, _TensorForm) else x for x in self.leaves
        ]
        return json.dumps([self.tree, leaves])

    @classmethod
    def from_text(cls, text: str) -> CallForm:
        """Inverse of `as_text`."""
        tree, leaves = json.loads(text)

        def leaf(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            dtype, shape = value["tensor"]
            return _TensorForm(dtype, tuple(shape))

        return cls(tree, tuple(leaf(x) for x in leaves))


class _Unfit(Exception):
    """A module cannot stay eager by itself; the message says why, without its name."""


def _form_of(args: Any, kwargs: Any) -> tuple[CallForm, list[torch.Tensor]]:
    """What a call looks like while tracing, and its tensors."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    forms = [_tensor_form(x) if isinstance(x, torch.Tensor) else _plain(x) for x in leaves]
    if not any(isinstance(x, _TensorForm) and x.dim is not None for x in forms):
        raise _Unfit("is called with no row per token")
    return CallForm(pytree.treespec_dumps(tree), tuple(forms)), tensors


def _plain(value: Any) -> Any:
    if not isinstance(value, _PLAIN_TYPES):
        raise _Unfit(f"is called with a {type(value).__name__}")
    return value


def _tensor_form(value: torch.Tensor) -> _TensorForm:
    counted = [isinstance(size, torch.SymInt) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    if any(counted) and not value.dtype.is_floating_point:
        raise _Unfit(f"is called with a number per token ({dtype}), positions or choices")
    symbols = [s for s in value.shape if isinstance(s, torch.SymInt)]
    if len(symbols) > 1 or any(not s.node.expr.is_Symbol for s in symbols):
        raise _Unfit(f"is called with a tensor of {list(value.shape)}")
    return _TensorForm(
        dtype, tuple(None if c else s for c, s in zip(counted, value.shape, strict=True))
    )


@dataclass(frozen=True)
class _Kind:
    """Modules that compute alike, called alike.

    Attributes:
        spec: what a program says of them.
        outputs: of the op, see `girih.kernels.eager_ops`.
        tree: structure of the module's result.
        leaves: of it; None where a tensor is.
    """

    spec: EagerSpec
    outputs: str
    tree: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class _Class:
    """A class that stands aside."""

    place: str
    reason: str


class EagerModules:
    """The classes of a model that stay eager, and a context in which they do.

    Args:
        model: on the meta device.
        mark: says which model it is, in names of modules.
    """

    def __init__(self, model: torch.nn.Module, mark: str) -> None:
        self._model, self._mark = model, mark
        self._paths = {module: path for path, module in model.named_modules()}
        self._classes: dict[type, _Class] = {}
        self._marks: dict[torch.nn.Module, str] = {}
        self._kinds: dict[tuple[str, CallForm], _Kind] = {}
        self._unknown: tuple[torch.nn.Module, CallForm] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let their classes leave `girih::eager_module` calls."""
        replaced = []
        for owner in self._classes:
            replaced.append((owner, owner.__dict__.get("forward")))
            owner.forward = self._stand_in(owner.forward)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for owner, forward in replaced:
                if forward is None:
                    del owner.forward  # type: ignore[attr-defined]
                else:
                    owner.forward = forward  # type: ignore[attr-defined]

    def take(self, error: BaseException, run: Callable[[], object]) -> None:
        """Find the module in which tracing failed, and let it stay eager from now on.

        Args:
            error: what tracing failed with.
            run: traces again.

        Raises:
            TraceError: no module around the failure can; says why the smallest cannot.
        """
        if self._unknown is not None:
            (module, form), self._unknown = self._unknown, None
            try:
                self._admit(module, form, self._classes[type(module)])
            except _Unfit as why:
                raise TraceError(f"{self._paths[module]} cannot stay eager: it {why}") from why
            return
        refusals = []
        for call in _open_calls(self._model, run):
            owner = type(call.module)
            try:
                if owner.__module__.startswith("torch.") or owner in self._classes:
                    continue
                form, _ = _form_of(call.args, call.kwargs)
                self._admit(call.module, form, _Class(_place(error, call.module), _line(error)))
                return
            except _Unfit as why:
                refusals.append(f"{owner.__name__} cannot stay eager: it {why}")
        raise TraceError(refusals[0] if refusals else "no module was running")

    def _admit(self, module: torch.nn.Module, form: CallForm, found: _Class) -> None:
        """Try a module out and remember its kind."""
        path, kind = self._paths[module], type(module).__name__
        names = _tensor_names(module)
        outputs, tree, leaves = _tried(self._model, module, names, form)
        number = sum(1 for k in self._kinds.values() if k.spec.path == path)
        name = f"{self._mark}:{path}" + (f"#{number}" if number else "")
        spec = EagerSpec(name, kind, found.place, found.reason, path, names, form.as_text())
        self._kinds[self._mark_of(module), form] = _Kind(spec, outputs, tree, leaves)
        self._classes.setdefault(type(module), found)
        _register(spec, module)

    def _mark_of(self, module: torch.nn.Module) -> str:
        """Equal for modules that compute alike: `fingerprint`, and the numbers of layers inside."""
        if module not in self._marks:
            numbers = [
                (path, name, getattr(part, name))
                for path, part in module.named_modules()
                for name in _NUMBER_NAMES
                if hasattr(part, name)
            ]
            self._marks[module] = f"{fingerprint(module, 0)} {numbers}"
        return self._marks[module]

    def _stand_in(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        eager = self

        def call_or_stand_in(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self not in eager._paths:
                return forward(self, *args, **kwargs)
            return eager._call(self, args, kwargs)

        return call_or_stand_in

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths[module]
        try:
            form, tensors = _form_of(args, kwargs)
        except _Unfit as why:
            raise TraceError(f"{path} ({type(module).__name__}) {why}") from why
        kind = self._kinds.get((self._mark_of(module), form))
        if kind is None:
            self._unknown = (module, form)
            raise RuntimeError(f"{path} was not tried out yet")
        weights = [_tensor(module, name) for name in kind.spec.weights]
        results = torch.ops.girih.eager_module(
            tensors, weights, kind.spec.name, kind.outputs, *form.source
        )
        rest = iter(results)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in kind.leaves]
        return pytree.tree_unflatten(leaves, kind.tree)


class _Tensor:
    """Stands where a result has a tensor."""


_TENSOR = _Tensor()


def _tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Parameters, then buffers, each once."""
    return tuple(
        name for group in (module.named_parameters(), module.named_buffers()) for name, _ in group
    )


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def _register(spec: EagerSpec, module: torch.nn.Module) -> None:
    _specs[spec.name] = spec
    form, call = CallForm.from_text(spec.call), _functional(copy.deepcopy(module), spec.weights)

    def run(inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(call(form, inputs, weights))
        return [x.contiguous() for x in leaves if isinstance(x, torch.Tensor)]

    register_eager_module(spec.name, run)


def _functional(
    module: torch.nn.Module, names: tuple[str, ...]
) -> Callable[[CallForm, Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]:
    """A module on the meta device as a function of its tensors; one call runs at a time."""
    module = module.eval()
    alone = threading.Lock()  # the tensors are put into the module while it runs

    def call(
        form: CallForm, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> Any:
        args, kwargs = form.arguments(inputs)
        tensors = dict(zip(names, weights, strict=True))
        with alone, torch.no_grad():
            return torch.func.functional_call(module, tensors, args, kwargs)

    return call


# ---- trying a module out ----


def _tried(
    model: torch.nn.Module, module: torch.nn.Module, names: tuple[str, ...], form: CallForm
) -> tuple[str, Any, tuple[Any, ...]]:
    """Run a module on small inputs, in batches and alone.

    Returns:
        The op's `outputs`, and structure and leaves of the module's result.
    """
    weights = _random_weights(model, module, names)
    call = _functional(copy.deepcopy(module), names)
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
    plain = [_TENSOR if isinstance(x, torch.Tensor) else _plain_result(x) for x in leaves]
    return outputs, tree, tuple(plain)


def _called(call: Any, form: CallForm, inputs: list[torch.Tensor], weights: Any) -> Any:
    before = [x.clone() for x in inputs]
    try:
        result = call(form, inputs, weights)
    except Exception as error:
        raise _Unfit(f"does not run by itself: {_line(error)}") from error
    if not all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)):
        raise _Unfit("writes to what it is called with")
    return result


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _plain_result(value: Any) -> Any:
    if not isinstance(value, _PLAIN_TYPES):
        raise _Unfit(f"returns a {type(value).__name__}")
    return value


def _shape(whole: torch.Tensor, fewer: torch.Tensor) -> list[str]:
    """The shape of a result in words, "T" where it follows the number of tokens."""
    sizes = list(zip(whole.shape, fewer.shape, strict=False))
    shape = ["T" if a != b else str(a) for a, b in sizes]
    if whole.ndim != fewer.ndim or [s for s in sizes if s[0] != s[1]] != [(_ROWS, 5)]:
        raise _Unfit(f"returns {list(whole.shape)} for {_ROWS} tokens, not one row for each")
    return shape


def _require_alike(whole: torch.Tensor, part: torch.Tensor, dim: int, rows: list[int]) -> None:
    wanted = whole.index_select(dim, torch.tensor(rows))
    if part.shape == wanted.shape:
        a, b = (x.double().movedim(dim, 0).flatten(1) for x in (part, wanted))
        scale = b.abs().amax(1, keepdim=True)
        alike = ((a - b).abs() <= _TOLERANCE * scale + 1e-9) | (a.isnan() & b.isnan()) | (a == b)
        if bool(alike.all()):
            return
    raise _Unfit("does not give a token alone what it gives it among others")


def _random_input(form: _TensorForm, number: int) -> torch.Tensor:
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
    return [_tensor(real, name).detach() for name in names]


def _owner(model: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """The innermost part of transformers' own around a module: it knows how to begin."""
    parts = [p for p in model.modules() if hasattr(p, "_init_weights")]
    return [p for p in parts if any(inner is module for inner in p.modules())][-1]


# ---- finding the place ----


@dataclass(frozen=True)
class _Call:
    """A call of a module that did not return."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _open_calls(model: torch.nn.Module, run: Callable[[], object]) -> list[_Call]:
    """The calls that are open when `run` fails, innermost first, the model's own left out."""
    calls: list[_Call] = []

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is model:
            calls.clear()
        calls.append(_Call(module, args, kwargs))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        while calls and calls.pop().module is not module:
            pass

    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        run()
    except TraceError:
        return calls[:0:-1]
    finally:
        for hook in hooks:
            hook.remove()
    return []


def _place(error: BaseException, module: torch.nn.Module) -> str:
    """File and line of a module's code that tracing stopped at, else where its code begins."""
    found = None
    cause: BaseException | None = error
    while cause is not None:
        found = _own_frame(cause.__traceback__, module) or found
        cause = cause.__cause__ or cause.__context__
    if found is None:
        forward = inspect.unwrap(type(module).forward).__code__
        found = (forward.co_filename, forward.co_firstlineno)
    return f"{Path(found[0]).name}:{found[1]}"


def _own_frame(trace_back: TracebackType | None, module: torch.nn.Module) -> tuple[str, int] | None:
    found = None
    while trace_back is not None:
        frame = trace_back.tb_frame
        own = frame.f_locals.get("self") is module
        if own and not frame.f_code.co_filename.endswith("torch/nn/modules/module.py"):
            found = (frame.f_code.co_filename, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
