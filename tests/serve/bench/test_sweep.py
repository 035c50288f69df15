"""`girih sweep`: points in processes of their own, failures as rows, the Pareto line."""

import json
import sys

import pytest

from girih.serve.bench import sweep
from girih.serve.bench.sweep import Point, pareto
from girih.serve.cli import main as cli

FAKE = """
import json, os, sys, time
words = sys.argv[1:]
with open({log!r}, "a") as file:
    file.write(json.dumps([os.getpid(), os.environ["TORCHINDUCTOR_CACHE_DIR"], *words]) + chr(10))
if "opt=O1" in words and words[0] == "bench":
    sys.exit("girih: no luck with O1")
if words[0] == "bench":
    [name] = [w.partition("=")[2] for w in words if w.startswith("workloads=")]
    speed = 30.0 if "opt=O3" in words else 10.0
    print("READY 2.50")
    print("RESULT " + json.dumps({{"workload": name, "output_tok_s": speed, "total_tok_s": 99.0}}))
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Stands in for the girih that points run; gives the words it was started with."""
    log = tmp_path / "log"
    program = FAKE.format(log=str(log))
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, "-S", "-c", program))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_a_sweep_writes_rows_table_and_plot(fake, tmp_path, capsys):
    out = tmp_path / "out"
    code = cli.main(
        ["sweep", "opt=O0,O1,O3", "workloads=single,batch8", "rounds=1", f"out={out}", "-q"]
    )
    assert code == 1  # a point failed
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [r["words"] for r in rows] == [
        [f"opt={level}", f"workloads={name}"]
        for level in ("O0", "O1", "O3")
        for name in ("single", "batch8")
    ]
    assert [r["error"] for r in rows] == [None] * 2 + ["girih: no luck with O1"] * 2 + [None] * 2
    assert [r["output_tok_s"] for r in rows] == [10.0, 10.0, 0.0, 0.0, 30.0, 30.0]
    assert rows[0]["compile_seconds"] == 0.0
    assert rows[-1]["compile_seconds"] > 0.0
    assert rows[-1]["ready_seconds"] == 2.5
    table = (out / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("failed: girih: no luck with O1") == 2
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    calls = fake()
    assert len({call[0] for call in calls}) == len(calls) == 6 + 2  # a process each, two compiles
    assert len({call[1] for call in calls}) == len(calls)  # and empty compiler caches
    bundles = [[w for w in c[1:] if w.startswith("bundle=")] for c in calls if "opt=O3" in c]
    assert len({b for [b] in bundles}) == 1


def test_a_mistake_is_told_before_anything_runs(fake, tmp_path, capsys):
    assert cli.main(["sweep", "opt=O0,O9", f"out={tmp_path / 'out'}"]) == 2
    assert "unknown option opt='O9'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_pareto_line_holds_what_nothing_beats():
    def point(compile_seconds, speed):
        return Point((), "O2", "single", compile_seconds, 1.0, speed)

    slow, fast, beaten, best = point(0, 5), point(10, 9), point(20, 8), point(30, 12)
    assert pareto([best, beaten, fast, slow]) == [slow, fast, best]
