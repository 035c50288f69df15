"""Keeps what runs over all families found, and writes it into `graph/ARCHITECTURES.md`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from support_families import Row

from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.build.sources import source_digest
from girih.passes.build.key import compiler_digest
from girih.passes.pipeline import PIPELINE

COLUMNS = ("family", "pieces/tiles", "error", "compiled", "result", *PIPELINE)


class Results:
    """Rows of earlier runs that the same compiler would give again.

    Only runs with compiled tiles are kept; eager ones take seconds.
    """

    def __init__(self, compiled: bool) -> None:
        self._mark = f"{compiler_digest()} {source_digest()[:16]}"
        self._path = self.directory() / "rows.jsonl" if compiled else None
        self._known: dict[str, Row] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                if entry["mark"] == self._mark:
                    self._known[entry["row"]["name"]] = Row(**entry["row"])

    @staticmethod
    def directory() -> Path:
        """Where packages and rows are kept."""
        path = Path(os.environ.get("ARCHS_CACHE") or cache_dir() / "archs")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def find(self, name: str) -> Row | None:
        """The row of a family, when it is known."""
        return self._known.get(name)

    def add(self, row: Row) -> None:
        """Keep a row."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"mark": self._mark, "row": asdict(row)}) + "\n")


def update_table(row: Row, path: Path, compiled: bool) -> None:
    """Write one row into the table, in place of the family's old one."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| family |"))
    head, body = lines[: first + 2], [line for line in lines[first + 2 :] if line.strip()]
    rows = {line.split("|")[1].strip(): line for line in body}
    rows[row.name] = _line(row, compiled)
    path.write_text("\n".join([*head, *(rows[name] for name in sorted(rows))]) + "\n")


def _line(row: Row, compiled: bool) -> str:
    size = f"{row.pieces}/{row.tiles}" if row.tiles else ""
    error = f"{row.max_error:.0e}" if row.passed else ""
    done = ("yes" if compiled else "no") if row.passed else ""
    counts = [str(row.rewrites.get(name, "")) for name in PIPELINE]
    cells = [row.name, size, error, done, " ".join(row.result.split()).replace("|", "/"), *counts]
    return "| " + " | ".join(cells) + " |"
