"""The stages of a compilation as one HTML page that needs nothing else."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from html import escape

from girih.graph.ir.program import AttentionStep, EagerStep, ProgramLayout, TileStep
from girih.passes.report import PassRecord
from girih.runtime.inspect.tile_stats import TileCost


@dataclass(frozen=True)
class Measured:
    """Costs of tiles, and how they were measured.

    Attributes:
        costs: per tile, one per number of tokens.
        peaks: GFLOP/s and GB/s of this machine, or None when no times were taken.
        threads: of the engine, with which they were taken.
        remark: what to know of them, or "".
    """

    costs: dict[str, list[TileCost]]
    peaks: tuple[float, float] | None = None
    threads: int = 0
    remark: str = ""


@dataclass(frozen=True)
class PageData:
    """The data of the page.

    Attributes:
        title: model, level and target.
        summary: the specification as text.
        records: one per pass.
        differences: what each pass changed, as a difference of texts, by pass name.
        layout: the program.
        notes: what each tile computes, by key.
        measured: what tiles cost.
        key: the bundle's key as text.
        graph: the graph after the last pass.
    """

    title: str
    summary: str
    records: tuple[PassRecord, ...]
    differences: dict[str, str]
    layout: ProgramLayout
    notes: dict[str, str]
    measured: Measured
    key: str
    graph: str


def render(data: PageData) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(data.title)}</h1><pre>{escape(data.summary)}</pre>",
        f"<h2>Passes</h2>{_passes(data)}",
        f"<h2>Program</h2>{_program(data)}",
        f"<h2>Tiles</h2>{_tiles(data)}",
        _folded("The graph after the last pass", f"<pre>{escape(data.graph)}</pre>"),
        _folded("The bundle's key", f"<pre>{escape(data.key)}</pre>"),
    ]
    head = f'<meta charset="utf-8"><title>{escape(data.title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;
 color:#24292f;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;
 border-bottom:1px solid #d8dee4;vertical-align:top}td.n,th.n{text-align:right;
 font-variant-numeric:tabular-nums}
pre{font:12px/1.45 ui-monospace,monospace;overflow-x:auto;background:#f6f8fa;padding:.6rem;
 border-radius:6px}
details{margin:.1rem 0}summary{cursor:pointer;color:#6e7781}
td pre{max-width:calc(min(72rem,100vw) - 5rem);box-sizing:border-box}
.map{display:flex;flex-wrap:wrap;gap:3px;align-items:center}
.map span{width:1.5rem;height:1.5rem;border-radius:4px}.map .a{width:.6rem;background:#afb8c1}
.chip{display:inline-block;width:.9rem;height:.9rem;border-radius:3px;margin-right:.4rem;
 vertical-align:-1px}
.add{color:#116329}.del{color:#a40e26}.off,.muted{color:#6e7781}.warn{color:#9a6700}
.bar{display:inline-block;height:.7rem;background:#12947f;border-radius:2px}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}pre{background:#161b22}
 th,td{border-color:#30363d}.add{color:#56d364}.del{color:#ff7b72}.warn{color:#d29922}}
"""


def _passes(data: PageData) -> str:
    rows = []
    for r in data.records:
        difference = data.differences.get(r.name)
        kind = "" if r.enabled else ' class="off"'
        remark = f'<span class="{"warn" if r.missed else ""}">{escape(r.remark())}</span>'
        nodes = f"{r.nodes_before} → {r.nodes_after}" if r.enabled else ""
        rows.append(
            f"<tr{kind}><td>{escape(r.name)}</td><td class=n>{r.rewrites}</td>"
            f"<td class=n>{nodes}</td>"
            f"<td class=n>{r.milliseconds:.1f}</td><td class=n>{r.check_milliseconds:.1f}</td>"
            f"<td>{remark}</td></tr>"
        )
        if difference:
            fold = _folded(f"{r.name}: before and after", f"<pre>{_coloured(difference)}</pre>")
            rows.append(f'<tr class="fold"><td colspan=6>{fold}</td></tr>')
    head = (
        "<tr><th>pass</th><th class=n>rewrites</th>"
        "<th class=n>nodes</th><th class=n>ms</th><th class=n>checks ms</th><th>remarks</th></tr>"
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _coloured(difference: str) -> str:
    lines = []
    for line in difference.splitlines():
        kind = {"+": "add", "-": "del"}.get(line[:1])
        text = escape(line)
        lines.append(f'<span class="{kind}">{text}</span>' if kind else text)
    return "\n".join(lines)


def _program(data: PageData) -> str:
    colours = _colours(data.layout)
    cells = []
    for step in data.layout.steps:
        if isinstance(step, TileStep):
            title = f"piece {step.piece}: tile {step.tile}, {data.notes.get(step.tile, '')}"
            cells.append(
                f'<span style="background:{colours[step.tile]}" title="{escape(title)}"></span>'
            )
        elif isinstance(step, AttentionStep):
            s = step.spec
            window = f", window {s.window}" if s.window else ""
            title = f"attention {step.layer}: {s.num_heads} heads of {s.head_dim}{window}"
            cells.append(f'<span class="a" title="{escape(title)}"></span>')
        elif isinstance(step, EagerStep):
            title = f"eager {step.spec.kind} ({step.spec.place}): {step.spec.reason}"
            cells.append(f'<span class="a" title="{escape(title)}"></span>')
        else:
            cells.append(f'<span class="a" title="{type(step).__name__}"></span>')
    counts = data.layout.tile_counts
    note = (
        f"{sum(counts.values())} pieces share {len(counts)} tiles; narrow grey cells are attention "
        "and other steps outside tiles. Pieces of one colour run the same compiled code."
    )
    return f'<div class="map">{"".join(cells)}</div><p class="muted">{note}</p>'


def _tiles(data: PageData) -> str:
    colours, measured = _colours(data.layout), data.measured
    rows = []
    for key, count in data.layout.tile_counts.items():
        chip = f'<span class="chip" style="background:{colours[key]}"></span>'
        label = f"{chip}{key}<br><span class=muted>{escape(data.notes.get(key, ''))}</span>"
        costs = measured.costs.get(key, [])
        for number, cost in enumerate(costs):
            span = f"rowspan={len(costs)}"
            first = f"<td {span}>{label}</td><td class=n {span}>{count}</td>"
            rows.append(f"<tr>{first if number == 0 else ''}{_cost(cost, measured.peaks)}</tr>")
    head = (
        "<tr><th>tile</th><th class=n>pieces</th><th class=n>tokens</th><th class=n>MB</th>"
        "<th class=n>MFLOP</th><th class=n>µs per call</th><th class=n>GB/s</th>"
        "<th class=n>GFLOP/s</th><th>of the nearer limit</th></tr>"
    )
    limits = "No compiled code in the cache: run <code>girih compile</code> first to see times."
    if measured.peaks:
        gflops, gbytes = measured.peaks
        limits = (
            f"Times are the fastest of several calls, with the engine's {measured.threads} thread"
            f"{'s' * (measured.threads != 1)}; so are the limits: {gflops:.0f} GFLOP/s (products "
            f"in the model's dtype), {gbytes:.1f} GB/s (reading memory). A tile that is called "
            "over and over may read its weights from a cache, faster than memory."
        )
    warning = f'<p class="warn">{escape(measured.remark)}</p>' if measured.remark else ""
    return f'<table>{head}{"".join(rows)}</table>{warning}<p class="muted">{limits}</p>'


def _cost(cost: TileCost, peaks: tuple[float, float] | None) -> str:
    cells = [f"{cost.tokens}", f"{cost.num_bytes / 1e6:.2f}", f"{cost.flops / 1e6:.1f}"]
    if cost.seconds is None or peaks is None:
        return "".join(f"<td class=n>{c}</td>" for c in (*cells, "–", "–", "–")) + "<td>–</td>"
    cells += [
        f"{cost.seconds * 1e6:.0f}",
        f"{cost.num_bytes / cost.seconds / 1e9:.1f}",
        f"{cost.flops / cost.seconds / 1e9:.0f}",
    ]
    share = cost.share_of(peaks[1] * 1e9, peaks[0] * 1e9) or 0.0
    bar = f'<span class="bar" style="width:{min(1.0, share) * 8:.1f}rem"></span> {share:.0%}'
    return "".join(f"<td class=n>{c}</td>" for c in cells) + f"<td>{bar}</td>"


def _colours(layout: ProgramLayout) -> dict[str, str]:
    """A colour per tile, as far apart as they go."""
    keys = list(layout.tile_counts)
    colours = {}
    for number, key in enumerate(keys):
        rgb = colorsys.hls_to_rgb((0.58 + number * 0.381966) % 1.0, 0.52, 0.55)
        colours[key] = "#" + "".join(f"{round(c * 255):02x}" for c in rgb)
    return colours


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
