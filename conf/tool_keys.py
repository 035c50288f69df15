"""Top-level keys of the verbs that look into compiler and caches: passes, cache, models, sweep."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class PassesRunKeys:
    """Top-level keys of `girih passes run`.

    Attributes:
        graph: a dumped NNN_PASS.json to start from; null traces the model.
        text: true prints the graph after the last pass.
    """

    graph: str | None = None
    text: bool = False


@dataclasses.dataclass
class PassesDiffKeys:
    """Top-level keys of `girih passes diff`.

    Attributes:
        before: a dumped NNN_PASS.json, or a level such as O1.
        after: another one of the same kind.
    """

    before: str | None = None
    after: str | None = None


@dataclasses.dataclass
class PassesBisectKeys:
    """Top-level keys of `girih passes bisect`.

    Attributes:
        check: a shell command with {opt} in it that succeeds while the result is good; null takes
            `opt.verify`.
    """

    check: str | None = None


@dataclasses.dataclass
class SweepKeys:
    """Top-level keys of `girih sweep`.

    Attributes:
        out: directory for rows.jsonl, table.md and pareto.png.
    """

    out: str = "sweep"


@dataclasses.dataclass
class CachePruneKeys:
    """Top-level keys of `girih cache prune`.

    Attributes:
        max_gib: bundles used longest ago go until the rest fits; null takes the default of
            compile.cache_gib; 0 removes all.
    """

    max_gib: float | None = None


@dataclasses.dataclass
class ModelsRmKeys:
    """Top-level keys of `girih models rm`.

    Attributes:
        name: of the model, as `girih models` lists it.
    """

    name: str | None = None
