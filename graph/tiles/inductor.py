"""Tiles to machine code: the only file that touches `torch._inductor`.

Each tile becomes an AOTInductor package (`.pt2`): it holds the shared object, so loading needs no
compiler and no Inductor cache, and weights stay inputs, so one package serves every piece that
shares the tile. Tiles take and return tensors only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import girih.kernels.ops.all_ops  # registers the ops that tiles call  # noqa: F401
from girih.graph.ir.text import size_parts
from girih.graph.ir.tile_file import example_size
from girih.graph.tiles.settings import MAX_STEP_TOKENS, inductor_options
from girih.kernels.base.errors import BundleError, CompileError
from girih.kernels.base.target import Target, resolve_target
from girih.kernels.build.sources import LEAN_HEADERS

TileFn = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_DEVICE_EXPRESSION = 'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");'


def compile_tile(graph: fx.Graph, path: Path, target: Target) -> None:
    """Compile one tile graph to an AOTInductor package at `path`.

    Args:
        graph: placeholders with `meta["val"]`, tensor outputs.
        path: file to write, ending in ".pt2".
        target: what to compile for.

    Raises:
        CompileError: Inductor or its C++ compiler failed; the first lines say why.
    """
    import torch._inductor

    module = fx.GraphModule({}, graph)
    examples, dynamic = _example_inputs(graph)
    try:
        with warnings.catch_warnings(), _quiet(), _lean_headers(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, examples, dynamic_shapes=dynamic)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=inductor_options(target)
            )
    except Exception as error:
        lines = "\n".join(str(error).strip().splitlines()[:12])
        raise CompileError(
            f"tile could not be compiled for {target.isa}: {type(error).__name__}: {lines}\n"
            "a C++ compiler (g++) must be installed to compile; opt=O0 runs without one"
        ) from error


def warm_up() -> None:
    """Have Inductor import and set up what every tile needs, by generating code for a small one."""
    import torch._inductor.package

    module = fx.GraphModule({}, fx.symbolic_trace(_small).graph)
    x = torch.zeros(5, 8)
    with warnings.catch_warnings(), _quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        rows = torch.export.Dim("rows", min=2, max=MAX_STEP_TOKENS)
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
        with tempfile.TemporaryDirectory() as scratch:
            options = {
                **inductor_options(resolve_target()),
                "aot_inductor.package": True,
                "aot_inductor.package_cpp_only": True,
                "aot_inductor.output_path": f"{scratch}/small",
            }
            torch._inductor.aot_compile(exported.module(), (x,), options=options)  # type: ignore[arg-type]


def _small(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).exp()


def load_tile(path: Path) -> TileFn:
    """Load a compiled tile; runs no compiler.

    The package loader is used directly: `torch._inductor.aoti_load_package` probes for a compiler.

    Raises:
        BundleError: the package does not hold code that this process can load.
    """
    try:
        return _load_package(path)
    except RuntimeError as error:
        if "dlopen" not in str(error):
            raise BundleError(f"tile {path} cannot be loaded: {_first_line(error)}") from error
    return _load_beside(path)


def _load_package(path: Path) -> TileFn:
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    run: TileFn = loader.boxed_run
    return run


def _load_beside(path: Path) -> TileFn:
    """Load with the package unpacked beside it: temporary directories may be mounted noexec."""
    usual = os.environ.get("TMPDIR")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".run-") as scratch:
            os.environ["TMPDIR"] = scratch
            return _load_package(path)
    except (OSError, RuntimeError) as error:
        raise BundleError(
            f"tile {path} cannot be loaded: {_first_line(error)}. Neither the temporary directory "
            f"({usual or tempfile.gettempdir()}) nor the bundle's lets code run (mounted noexec?); "
            "set TMPDIR to a directory that does"
        ) from error
    finally:
        os.environ.pop("TMPDIR", None)
        if usual is not None:
            os.environ["TMPDIR"] = usual


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def eager_tile(graph: fx.Graph) -> TileFn:
    """Run a tile's graph operation by operation (O0, and the oracle of compiled tiles)."""
    # Not called as a module: a trace in another thread would see the call.
    forward = fx.GraphModule({}, graph).forward

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(forward(*inputs))

    return run


class _Sizes:
    """One export dimension, with example value, for each symbol of the traced graph."""

    def __init__(self) -> None:
        self.dims: dict[str, tuple[int, Any]] = {}

    def example(self, size: Any) -> tuple[int, Any]:
        """Return (example value, export dimension or None) of an int or SymInt."""
        if isinstance(size, int):
            return size, None
        factor, name = size_parts(size)
        if name not in self.dims:
            number = len(self.dims)
            dim = torch.export.Dim(f"d{number}", min=2, max=MAX_STEP_TOKENS)
            self.dims[name] = (example_size(number), dim)
        value, dim = self.dims[name]
        return factor * value, dim if factor == 1 else factor * dim


def _example_inputs(
    graph: fx.Graph,
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any] | None, ...]]:
    """Fake CPU tensors of the placeholders' shapes, and which dimensions stay symbolic."""
    sizes = _Sizes()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    examples, dynamic = [], []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shape, dims = [], {}
        for axis, size in enumerate(value.shape):
            number, dim = sizes.example(size)
            shape.append(number)
            if dim is not None:
                dims[axis] = dim
        with mode:
            examples.append(torch.empty(shape, dtype=value.dtype, device="cpu"))
        dynamic.append(dims or None)
    return tuple(examples), tuple(dynamic)


@contextlib.contextmanager
def _lean_headers() -> Iterator[None]:
    """Have g++ find headers first that it reads faster than the system's."""
    folders = [LEAN_HEADERS]
    if _is_known(Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime"):
        folders.append(Path(__file__).parent / "aoti_include")
    before = os.environ.get("CPLUS_INCLUDE_PATH")
    paths = [*map(str, folders), *([before] if before else [])]
    os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(paths)
    try:
        yield
    finally:
        del os.environ["CPLUS_INCLUDE_PATH"]
        if before:
            os.environ["CPLUS_INCLUDE_PATH"] = before


def _is_known(runtime_headers: Path) -> bool:
    """Return whether torch's header is the one that `aoti_include/` was written for."""
    header = runtime_headers / "model_base.h"
    text = header.read_text() if header.exists() else ""
    return text.count("std::regex") == 2 and _DEVICE_EXPRESSION in text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's compile logs off the terminal; failures are reported as errors."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            yield
    finally:
        logger.setLevel(level)
