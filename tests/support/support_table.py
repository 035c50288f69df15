"""Writes `graph/ARCHITECTURES.md` from the rows of a run over all families."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from support_agreement import Agreement
from support_architectures import REFUSED

_HEAD = """# Architectures

Tiny random models of every text decoder and encoder family of transformers {version}, written to a
checkpoint, traced, lowered at O2, split into tiles and run by the executable with paged KV and
state memory: three sequences packed into one step, prefilled in two uneven chunks, then 16 greedy
tokens decoded together. Logits of every step and the tokens are compared with transformers' eager
float32 model on each whole sequence alone. Encoders: hidden states of three packed sequences.
Written by `make archs` ({mode}); {agree} of {total} agree.

"error" is the largest difference of any logit; "pieces/tiles": tile calls per step and distinct
tiles; the columns behind are rewrites per pass.

"""


def write_table(rows: list[Agreement], path: Path, compiled: bool) -> None:
    """Write the table, or only print how many agree when a run was partial."""
    passes = list(dict.fromkeys(name for row in rows for name in row.rewrites))
    agree = sum(row.agrees for row in rows)
    mode = "compiled tiles" if compiled else "eager tiles"
    version = importlib.metadata.version("transformers")
    total = len(rows) + sum(reason.startswith("not built") for reason in REFUSED.values())
    lines = [
        _HEAD.format(version=version, mode=mode, agree=agree, total=total).rstrip(),
        "",
        "| family | pieces/tiles | error | result | " + " | ".join(passes) + " |",
        "|---|---|---|---|" + "---|" * len(passes),
    ]
    lines += [_line(row, passes) for row in sorted(rows, key=lambda r: r.name)]
    for name, reason in REFUSED.items():
        if reason.startswith("not built"):
            lines.append(f"| {name} | | | {reason} |" + " |" * len(passes))
    path.write_text("\n".join(lines) + "\n")


def _line(row: Agreement, passes: list[str]) -> str:
    counts = " | ".join(str(row.rewrites.get(name, "")) for name in passes)
    size = f"{row.pieces}/{row.tiles}" if row.tiles else ""
    error = f"{row.max_error:.0e}" if row.agrees else ""
    return f"| {row.name} | {size} | {error} | {row.result.replace('|', '/')} | {counts} |"
