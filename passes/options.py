"""What can be switched per pass, as plain dataclasses (no torch: read by `--help`).

`conf/opt/O*.yaml` fills these. The order of passes is code (`passes/pipeline.py`); whether one
runs is configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass
class OptConfig:
    """An optimisation level and its switches.

    Attributes:
        level: name shown to people and kept in the bundle, e.g. "O2".
        compile: False runs every piece as an eager graph with reference attention (O0).
        passes: one switch per pass.
    """

    level: str = "O2"
    compile: bool = True
    passes: PassesConfig = field(default_factory=PassesConfig)
    dump: str | None = None
