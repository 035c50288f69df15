"""The pool of compiling processes: what failures look like."""

import os
import signal
from pathlib import Path

import pytest
import torch
from support_graphs import TARGET, capture

from girih.graph.compile_pool import CompilePool
from girih.graph.tile_file import write_tile
from girih.kernels.errors import CompileError


@pytest.fixture
def worker(monkeypatch):
    """Make the pool start another program as its workers."""

    def use(program):
        import subprocess
        import sys

        def start():
            return subprocess.Popen(
                [sys.executable, "-S", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        monkeypatch.setattr(CompilePool, "_start", staticmethod(start))

    return use


ANSWERS = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    open(job["package"], "w").write(job["target"]["isa"])
    print(json.dumps({"error": None, "seconds": 2.5}), flush=True)
"""


def jobs(path, count):
    return [(path / f"{i}.json", path / f"{i}.pt2") for i in range(count)]


def test_every_tile_is_compiled_and_reported(worker, tmp_path):
    worker(ANSWERS)
    finished = []
    with CompilePool(2) as pool:
        pool.compile(jobs(tmp_path, 5), TARGET, lambda p, s: finished.append((p.name, s)))
    assert sorted(finished) == [(f"{i}.pt2", 2.5) for i in range(5)]
    assert {p.read_text() for p in tmp_path.glob("*.pt2")} == {"avx2"}


def test_processes_end_with_the_pool(worker):
    worker(ANSWERS)
    with CompilePool(3) as pool:
        processes = pool._processes
    assert [p.returncode for p in processes] == [0, 0, 0]


def test_processes_are_killed_when_the_build_fails(worker):
    worker("import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt), CompilePool(2) as pool:
        processes = pool._processes
        raise KeyboardInterrupt
    assert [p.returncode for p in processes] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import os; os._exit(3)", 3),
        ("import sys; sys.stdin.readline(); sys.exit(7)", 7),
        ("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)", -9),
    ],
    ids=["before", "during", "killed"],
)
def test_a_worker_that_dies(worker, tmp_path, program, code):
    worker(program)
    with (
        pytest.raises(CompileError, match=rf"exit code {code} while building 0\.pt2"),
        CompilePool(1) as pool,
    ):
        pool.compile(jobs(tmp_path, 1), TARGET, lambda p, s: None)


ONE_DIES = """
import sys, time
line = sys.stdin.readline()
if "0.pt2" in line:
    sys.exit(7)
time.sleep(600)
"""


def test_a_dead_worker_ends_the_jobs_of_the_others(worker, tmp_path):
    worker(ONE_DIES)
    with pytest.raises(CompileError, match=r"exit code 7 while building 0"), CompilePool(2) as pool:
        pool.compile(jobs(tmp_path, 6), TARGET, lambda p, s: None)


def test_an_interrupt_ends_the_jobs(worker, tmp_path):
    worker(ANSWERS)

    def interrupt(package, seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CompilePool(2) as pool:
        pool.compile(jobs(tmp_path, 6), TARGET, interrupt)
    assert all(p.returncode is not None for p in pool._processes)


def test_the_error_of_a_tile_is_passed_on(worker, tmp_path):
    worker('import sys; sys.stdin.readline(); print(\'{"error": "no such op", "seconds": 0}\')')
    with pytest.raises(CompileError, match="no such op"), CompilePool(1) as pool:
        pool.compile(jobs(tmp_path, 1), TARGET, lambda p, s: None)


def tile_of(function):
    captured = capture(function, {}, {"x": ("T", 8)})
    output = next(n for n in captured.graph.nodes if n.op == "output")
    output.args = ((output.args[0],),)
    return captured.graph


def test_a_real_worker_says_why_it_cannot_compile(tmp_path, monkeypatch):
    write_tile(tile_of(lambda x: torch.sin(x)), tmp_path / "0.json")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("PATH", str(Path(os.sep) / "nowhere"))
    message = r"could not be compiled for avx2"
    with pytest.raises(CompileError, match=message) as caught, CompilePool(1) as pool:
        pool.compile(jobs(tmp_path, 1), TARGET, lambda p, s: None)
    assert "opt=O0 runs without one" in str(caught.value)
    assert not (tmp_path / "0.pt2").exists()
