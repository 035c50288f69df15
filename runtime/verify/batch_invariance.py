"""Checks that a program computes the same bits for a request whatever else is in the batch.

    packed linears, paged attention   one chain of additions per row, by construction (kernels/)
    fused tile code                   element by element, or along one row
    sampler                           row by row

That is all of an O2 program of most models, so nothing is switched by `runtime.batch_invariant`:
it refuses what is computed otherwise. Products by torch's libraries choose their path by the number
of rows; eager code and compiled code differ in their last bits.
"""

from __future__ import annotations

from girih.graph.bundle.bundle import Bundle
from girih.graph.bundle.files import tile_graph
from girih.graph.execute.executable import Executable
from girih.graph.ir.tile_file import read_tile
from girih.kernels.base.errors import ConfigError

INVARIANT_ATTENTION = "cpu_paged"
PRODUCTS = frozenset(
    (
        *("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul"),
        *("mm", "mv", "conv1d", "conv2d", "convolution", "scaled_dot_product_attention"),
        *("_grouped_mm", "expert_linear"),
    )
)
"""Operations that torch's libraries compute."""


def require_batch_invariant(executable: Executable, bundle: Bundle | None) -> None:
    """Raise `ConfigError` unless the bits of a request depend on itself only.

    Args:
        executable: the program, bound.
        bundle: where its compiled tiles come from; None for eager pieces.
    """
    reason = why_not_invariant(executable, bundle)
    if reason is not None:
        raise ConfigError(
            f"runtime.batch_invariant=true: {reason}, so the bits of a result may depend on what "
            "else is in the batch. Leave the setting out, or see runtime/README.md"
        )


def why_not_invariant(executable: Executable, bundle: Bundle | None) -> str | None:
    """Return what of a program may depend on the batch, or None."""
    if bundle is None:
        return "eager pieces answer (opt=O0, or compile.mode=background without a bundle)"
    if executable.layout.state_specs:
        return "the model's recurrent layers run in plain torch"
    if executable.layout.eager_specs:
        return f"the model's {executable.layout.eager_specs[0].kind} runs in plain torch"
    for choice in executable.backends:
        if choice.backend.name != INVARIANT_ATTENTION:
            return f"attention runs on the {choice.backend.name} backend"
    for key in executable.layout.tile_counts:
        found = {_operation(n.target) for n in read_tile(tile_graph(bundle.path, key)).nodes}
        products = sorted(found & PRODUCTS)
        if products:
            return f"tile {key} calls {', '.join(products)} of torch (opt.passes.pack_linears off?)"
    return None


def _operation(target: object) -> str:
    """ "linear" of aten.linear.default."""
    return str(target).split(".")[1] if str(target).count(".") > 1 else str(target)
