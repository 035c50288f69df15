"""The custom ops of namespace `girih`: schemas, shape rules (fakes) and reference kernels.

Importing this module is enough to trace and to run; `load_library` (`kernels/build`) replaces
the CPU kernels by the C++ ones.

`girih::attention(q, k, v, scale, causal, window, softcap, sinks, slopes, chunk) -> out`
    What tracing leaves in the graph for one attention layer. q [T, H, D], k [T, Hkv, D],
    v [T, Hkv, Dv] -> [T, H, Dv]; one sequence. slopes [H] adds slope * (key position - query
    position) to the scores (ALiBi); chunk n hides all keys before the query's chunk of n tokens.
`girih::paged_attention(q, k, v, key_cache, value_cache, query_start, seq_lens, block_table,
slot_mapping, scale, causal, window, softcap, sinks, out) -> ()`
    Writes the T new tokens to their slots, then attends for every request over its cached and
    new tokens. query_start int32 [R+1], seq_lens int32 [R] (with the new tokens), block_table
    int32 [R, max_blocks], slot_mapping int64 [T] (-1: padding; not written, its output is zero).
    Rows of no request are zero as well. Cache layout: `girih.kernels.kv.layout`.
`girih::pack_linear_(packed, weight_rows, row_start) -> ()`
    Writes weight_rows [n, K] to rows [row_start, row_start+n) of a packed weight.
`girih::packed_linear(x, packed, bias, n) -> out`
    x [T, K] of any strides -> [T, n] in x's dtype, float32 accumulation, bias [n] or none.
"""

from __future__ import annotations

import torch

from girih.kernels.ops import reference

SCHEMAS = (
    "attention(Tensor q, Tensor k, Tensor v, float scale, bool causal, int window, float softcap, "
    "Tensor? sinks, Tensor? slopes=None, int chunk=0) -> Tensor",
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor slot_mapping, float scale, "
    "bool causal, int window, float softcap, Tensor? sinks, Tensor(c!) out) -> ()",
    "pack_linear_(Tensor(a!) packed, Tensor weight_rows, int row_start) -> ()",
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor",
)

_definitions = torch.library.Library("girih", "DEF")
for _schema in SCHEMAS:
    _definitions.define(_schema)
_definitions.impl("attention", reference.attention, "CPU")
_definitions.impl("attention", reference.attention, "CUDA")

# In an object of their own, because the C++ library takes their place on the CPU.
_references: torch.library.Library | None = None


def register_references() -> None:
    """Make the pure-torch kernels the CPU kernels (done on import)."""
    global _references
    if _references is None:
        _references = torch.library.Library("girih", "IMPL")
        for name in ("paged_attention", "pack_linear_", "packed_linear"):
            _references.impl(name, getattr(reference, name), "CPU")


def drop_references() -> None:
    """Withdraw the pure-torch CPU kernels, so that a C++ library can register its own."""
    global _references
    if _references is not None:
        _references._destroy()
        _references = None


register_references()


@torch.library.register_fake("girih::attention")
def _attention_fake(  # noqa: PLR0913 (the schema's arguments)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    chunk: int = 0,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@torch.library.register_fake("girih::paged_attention")
def _paged_attention_fake(*arguments: object) -> None:
    return None


@torch.library.register_fake("girih::pack_linear_")
def _pack_linear_fake(packed: torch.Tensor, weight_rows: torch.Tensor, row_start: int) -> None:
    return None


@torch.library.register_fake("girih::packed_linear")
def _packed_linear_fake(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int
) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))
