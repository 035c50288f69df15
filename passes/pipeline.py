"""The pipeline: every pass, in order, with the reason it stands where it stands."""

from __future__ import annotations

from girih.passes import canonicalize, gather_last_rows, merge_sibling_linears, pack_linears
from girih.passes.pass_api import PASSES, Pass

PIPELINE: tuple[str, ...] = (
    "canonicalize",  # first: asserts and no-op casts would hide every later pattern
    "gather_last_rows",  # before merging: it must see plain linears between attention and head
    "merge_sibling_linears",  # before packing: packed weights cannot be joined
    "pack_linears",  # last: fixes the weights' layout for the target
)

_MODULES = (canonicalize, gather_last_rows, merge_sibling_linears, pack_linears)


def pipeline() -> tuple[Pass, ...]:
    """The registered passes in pipeline order."""
    return tuple(PASSES[name] for name in PIPELINE)
