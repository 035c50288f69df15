"""The lowered graphs of three tiny models as text, at each level, and the catalogue of passes.

A change that means to alter graphs rewrites both: `pytest tests/passes --update-golden`.
"""

from pathlib import Path

import pytest
from support_models import tiny_traced

from girih.conf.files import load_opt_level
from girih.passes.pipeline import FACTS

ROOT = Path(__file__).parents[3]
GRAPHS = {"O0": "O0", "O1": "O0", "O2": "O2", "O3": "O2"}
"""Whose golden a level has: O1 compiles what O0 runs, O3 tells the compiler more than O2."""
BEGIN, END = "<!-- catalogue: begin -->\n", "<!-- catalogue: end -->\n"


@pytest.mark.parametrize("level", GRAPHS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_graph_of_a_tiny_model(kind, level, lowered_by, update_golden):
    lowered, _ = lowered_by(tiny_traced(kind, dtype="bfloat16"), *load_opt_level(level).runs())
    path = ROOT / "tests" / "golden" / f"{kind}_{GRAPHS[level]}.txt"
    if update_golden:
        path.write_text(lowered.as_text())
    assert lowered.as_text() == path.read_text(), (
        "the graph changed; if that is meant, run pytest tests/passes --update-golden"
    )


def catalogue():
    """The passes as a table, from the pipeline."""
    rows = [f"| `{p.name}` | {p.phase.value} | {p.summary} |" for p in FACTS]
    return "\n".join(["| pass | phase | effect |", "|---|---|---|", *rows]) + "\n"


def test_catalogue_in_the_readme(update_golden):
    path = ROOT / "passes" / "README.md"
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if update_golden:
        shown = catalogue()
        path.write_text(before + BEGIN + shown + END + after)
    assert shown == catalogue(), "run pytest tests/passes --update-golden"
