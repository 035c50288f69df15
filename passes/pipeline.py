"""The pipeline: every pass, in order, with the reason it stands where it stands.

The table is data and needs no torch (`girih passes list`); `pipeline()` imports the passes
themselves, each from the module of its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from girih.passes.pass_api import Pass


class Phase(Enum):
    """Part of the pipeline a pass belongs to, in order."""

    CANONICALIZE = "canonicalize"
    FUSE = "fuse"
    LOWER = "lower"


@dataclass(frozen=True)
class PassFacts:
    """The description of a pass, for people.

    Attributes:
        name: of the function, its module and its switch, `opt.passes.NAME`.
        phase: part of the pipeline.
        summary: what it does; also the first line of its docstring.
    """

    name: str
    phase: Phase
    summary: str


FACTS: tuple[PassFacts, ...] = (
    # first: asserts and no-op casts would hide every later pattern
    PassFacts(
        "canonicalize",
        Phase.CANONICALIZE,
        "Drop asserts, no-op casts and views, repeated nodes and dead code; fix the device.",
    ),
    # before merging: it must see plain linears between attention and head
    PassFacts(
        "gather_last_rows",
        Phase.FUSE,
        "Move the selection of the needed rows up to just behind the last attention.",
    ),
    # before packing: packed weights cannot be joined
    PassFacts(
        "merge_sibling_linears",
        Phase.FUSE,
        "Merge linears that read the same tensor into one, as a change of the weight plan.",
    ),
    # last: fixes the weights' layout for the target
    PassFacts(
        "pack_linears",
        Phase.LOWER,
        "Replace linears by `girih::packed_linear`, and embeddings that share their weight.",
    ),
)

PIPELINE: tuple[str, ...] = tuple(facts.name for facts in FACTS)


def pipeline() -> tuple[Pass, ...]:
    """The passes in pipeline order."""
    from girih.passes.pass_api import PASSES

    for name in PIPELINE:
        importlib.import_module(f"girih.passes.rewrites.{name}")
    return tuple(PASSES[name] for name in PIPELINE)
