"""`girih sweep`: measure every combination of settings, each in fresh processes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from girih.conf.compose import compose_config
from girih.conf.schema import ALIASES
from girih.conf.sweeps import sweep_points
from girih.kernels.base.errors import ConfigError
from girih.serve.bench.plots import require_matplotlib
from girih.serve.bench.sweep import (
    Point,
    SweepPlan,
    SweepRunner,
    table,
    write_plot,
    write_rows,
)
from girih.serve.cli.preflight import engine_of, make_folder
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Measure all points; exit code 1 when one failed. Rows, table and plot go to `out`."""
    if not words:
        raise ConfigError(
            "there is nothing to sweep; give values, e.g. `girih sweep opt=O0,O2 workloads=single`"
        )
    require_matplotlib()
    own = [w for w in words if w.startswith("out=")]
    points = sweep_points([w for w in words if w not in own])
    plans = [_plan(point, _varied(points)) for point in points]  # mistakes show before the work
    out = make_folder("out", compose_config("sweep", own)["out"])
    rows: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="girih-sweep-") as scratch:
        runner = SweepRunner(Path(scratch), lambda text: _say(options, text))
        for number, plan in enumerate(plans, start=1):
            _say(options, f"point {number} of {len(plans)}: ")
            rows += runner.run(plan)
            write_rows(rows, out / "rows.jsonl")  # what is measured is kept, whatever comes
    (out / "table.md").write_text(table(rows))
    write_plot(rows, out / "pareto.png", "start-up against speed")
    print(table(rows), end="")
    print(f"{out}/rows.jsonl  {out}/table.md  {out}/pareto.png")
    return 1 if any(p.error for p in rows) else 0


def _varied(points: list[list[str]]) -> set[int]:
    """Positions of the words that are not the same in all points."""
    return {i for i in range(len(points[0])) if len({p[i] for p in points}) > 1}


def _plan(words: list[str], varied: set[int]) -> SweepPlan:
    config = compose_config("sweep", words)
    engine_of(config, writes_bundle=True)
    opt = config["opt"]
    bench = tuple(w for w in words if _key(w).startswith("bench"))
    return SweepPlan(
        varied=tuple(words[i] for i in sorted(varied)),
        engine=tuple(w for w in words if w not in bench),
        bench=bench,
        level=opt["level"],
        compiles=opt["compile"],
    )


def _key(word: str) -> str:
    key = word.partition("=")[0]
    return ALIASES.get(key, key)


def _say(options: Options, text: str) -> None:
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)
