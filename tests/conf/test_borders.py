"""Who may import what."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "graph", "passes", "runtime", "serve")


def importers(pattern, folders):
    found = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(rf"^\s*(from|import) ({pattern})\b", path.read_text(), re.MULTILINE):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_hydra_stays_in_conf():
    assert importers("hydra|omegaconf", FOLDERS) == set()
    users = {"conf/compose.py", "conf/sweeps.py"}
    assert importers("hydra|omegaconf", ("conf",)) == users


def test_conf_is_read_by_the_front_end_only():
    assert importers(r"girih\.conf", FOLDERS[:-1]) == set()


def test_the_front_end_holds_no_tensors():
    assert importers("torch|numpy", ("serve", "conf")) == set()


def test_http_libraries_stay_in_the_server():
    users = importers("fastapi|uvicorn|starlette", ("serve",))
    assert {p for p in users if not p.startswith("serve/http/")} == set()
    assert importers("fastapi|uvicorn|starlette", FOLDERS[:-1]) == set()
