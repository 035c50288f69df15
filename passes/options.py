"""Switches per pass and per level, as plain dataclasses (no torch: read by `--help`).

`conf/opt/O*.yaml` fills these. The order of passes is code (`passes/pipeline.py`); whether one
runs is configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from girih.kernels.base.choices import check_choices, one_of


@dataclass
class PassOptions:
    """Switch of one pass."""

    enabled: bool = False


@dataclass
class PassesConfig:
    """One switch per pass, in pipeline order."""

    canonicalize: PassOptions = field(default_factory=PassOptions)
    gather_last_rows: PassOptions = field(default_factory=PassOptions)
    merge_sibling_linears: PassOptions = field(default_factory=PassOptions)
    pack_linears: PassOptions = field(default_factory=PassOptions)


PASS_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(PassesConfig))


@dataclass
class OptConfig:
    """An optimisation level and its switches.

    Attributes:
        level: name shown to people and kept in the bundle, e.g. "O2".
        compile: false runs every piece as an eager graph with reference attention (O0).
        passes: one switch per pass; `opt.passes.NAME=false` is short for `.enabled=false`.
        fast_math: fused code may keep float32 between operations and reorder sums, instead of
            rounding where the model rounds.
        stop_after: the last pass to run (for looking at a graph half way, and for bisecting).
        strict: a pass that finds nothing where it ought to is an error instead of a remark.
        verify: verify the build: run each changed graph against the one before, and each compiled
            tile against its eager graph, on random values.
        dump: directory for the graph after each pass that changed it, as text, difference and
            replayable JSON.
    """

    level: str = "O2"
    compile: bool = True
    passes: PassesConfig = field(default_factory=PassesConfig)
    fast_math: bool = False
    stop_after: str | None = one_of(*PASS_NAMES, default=None)
    strict: bool = False
    verify: bool = False
    dump: str | None = None

    def __post_init__(self) -> None:
        check_choices("opt", self)

    def runs(self) -> tuple[str, ...]:
        """Names of the passes that run, in order."""
        names = PASS_NAMES
        if self.stop_after is not None:
            names = names[: names.index(self.stop_after) + 1]
        return tuple(n for n in names if getattr(self.passes, n).enabled)
