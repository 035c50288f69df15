"""Modules that cannot be captured: each stays as transformers wrote it, as a step of its own.

Tracing fails inside a module whose Python looks at values (`if x.max() > 4:`, a loop over
`.tolist()`). The smallest module around that place which is a function of single tokens is then
called through `girih::eager_module`, its weights named in the graph like all others, and tracing
starts again; everything around it compiles.

    failure ─▶ open calls, innermost first ─▶ run alone on small inputs ─▶ its class stands aside

`eager_verify.py` verifies what may stand aside. A module with attention, a cache or positions
inside fails there, and the model is refused. It stays a test.

Modules that compute alike share one function, which is called with their own weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from girih.graph.ir.program import EagerSpec, ProgramLayout
from girih.graph.trace.call_form import CallForm, Unfit, form_of
from girih.graph.trace.eager_verify import TENSOR, as_function, first_line, tensor_of, verify_module
from girih.graph.trace.open_calls import open_calls, source_line
from girih.graph.trace.stamp import fingerprint
from girih.kernels.base.errors import BundleError, TraceError
from girih.kernels.ops.eager import register_eager_module

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
class _Kind:
    """Modules that compute alike, called alike.

    Attributes:
        spec: what a program says of them.
        outputs: of the op, see `girih.kernels.ops.eager`.
        tree: structure of the module's result.
        leaves: of it; `TENSOR` where a tensor is.
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
            except Unfit as why:
                raise TraceError(f"{self._paths[module]} cannot stay eager: it {why}") from why
            return
        refusals = []
        for call in open_calls(self._model, run):
            owner = type(call.module)
            try:
                if owner.__module__.startswith("torch.") or owner in self._classes:
                    continue
                form, _ = form_of(call.args, call.kwargs)
                self._admit(
                    call.module, form, _Class(source_line(error, call.module), first_line(error))
                )
                return
            except Unfit as why:
                refusals.append(f"{owner.__name__} cannot stay eager: it {why}")
        raise TraceError(refusals[0] if refusals else "no module was running")

    def _admit(self, module: torch.nn.Module, form: CallForm, found: _Class) -> None:
        """Try a module out and remember its kind."""
        path, kind = self._paths[module], type(module).__name__
        names = _tensor_names(module)
        outputs, tree, leaves = verify_module(self._model, module, names, form)
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
            form, tensors = form_of(args, kwargs)
        except Unfit as why:
            raise TraceError(f"{path} ({type(module).__name__}) {why}") from why
        kind = self._kinds.get((self._mark_of(module), form))
        if kind is None:
            self._unknown = (module, form)
            raise RuntimeError(f"{path} was not tried out yet")
        weights = [tensor_of(module, name) for name in kind.spec.weights]
        results = torch.ops.girih.eager_module(
            tensors, weights, kind.spec.name, kind.outputs, *form.source
        )
        rest = iter(results)
        leaves = [next(rest) if leaf is TENSOR else leaf for leaf in kind.leaves]
        return pytree.tree_unflatten(leaves, kind.tree)


def _tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Parameters, then buffers, each once."""
    return tuple(
        name for group in (module.named_parameters(), module.named_buffers()) for name, _ in group
    )


def _register(spec: EagerSpec, module: torch.nn.Module) -> None:
    _specs[spec.name] = spec
    form, call = CallForm.from_text(spec.call), as_function(copy.deepcopy(module), spec.weights)

    def run(inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(call(form, inputs, weights))
        return [x.contiguous() for x in leaves if isinstance(x, torch.Tensor)]

    register_eager_module(spec.name, run)
