"""The pool of compiling processes: what failures look like."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support_graphs import TARGET, capture

from girih.graph.ir.tile_file import write_tile
from girih.graph.tiles import worker as compile_worker
from girih.graph.tiles.pool import CompilePool
from girih.kernels.base.errors import CompileError


@pytest.fixture
def worker(monkeypatch):
    """Make the pool start another program as its workers."""

    def use(program):
        def start():
            return subprocess.Popen(
                [sys.executable, "-S", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

        monkeypatch.setattr(CompilePool, "_start", staticmethod(start))

    return use


ANSWERS = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    for tile, package in request["tiles"]:
        open(package, "w").write(request["target"]["isa"])
        print(json.dumps({"package": package, "error": None, "seconds": 2.5}), flush=True)
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


def test_the_process_ends_with_the_pool(worker):
    worker(ANSWERS)
    with CompilePool(3) as pool:
        process = pool._worker
    assert process.returncode == 0


def test_the_process_and_its_children_are_killed_when_the_build_fails(worker, tmp_path):
    child = tmp_path / "child"
    worker(
        "import os, time; pid = os.fork()\n"
        f"if pid: open({str(child)!r}, 'w').write(str(pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt), CompilePool(2) as pool:
        wait_for(lambda: child.exists() and child.read_text())
        raise KeyboardInterrupt
    assert pool._worker.returncode == -signal.SIGKILL
    wait_for(lambda: not_running(int(child.read_text())))


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def not_running(pid):
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().split()[2] == "Z"


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
    with pytest.raises(CompileError, match=rf"exit code {code};"), CompilePool(1) as pool:
        pool.compile(jobs(tmp_path, 1), TARGET, lambda p, s: None)


def test_an_interrupt_ends_the_jobs(worker, tmp_path):
    worker(ANSWERS)

    def interrupt(package, seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CompilePool(2) as pool:
        pool.compile(jobs(tmp_path, 6), TARGET, interrupt)
    assert pool._worker.returncode is not None


def test_the_error_of_a_tile_is_passed_on(worker, tmp_path):
    worker(
        "import sys; sys.stdin.readline(); "
        'print(\'{"package": "0.pt2", "error": "no such op", "seconds": 0}\')'
    )
    with pytest.raises(CompileError, match="no such op"), CompilePool(1) as pool:
        pool.compile(jobs(tmp_path, 1), TARGET, lambda p, s: None)


def test_the_compilers_end_when_their_user_is_killed(tmp_path):
    program = f"""
import os, subprocess, sys, time
if len(sys.argv) > 1:
    from girih.graph.tiles.worker import end_with_parent
    end_with_parent()
    child = os.fork()
    if child:
        open({str(tmp_path / "child")!r}, "w").write(str(child))
    time.sleep(600)
subprocess.Popen([sys.executable, __file__, "worker"], start_new_session=True)
time.sleep(600)
"""
    script = tmp_path / "user.py"
    script.write_text(program)
    user = subprocess.Popen([sys.executable, script])
    child = tmp_path / "child"
    wait_for(lambda: child.exists() and child.read_text())
    user.kill()
    user.wait()
    wait_for(lambda: not_running(int(child.read_text())))


@pytest.fixture
def compile_as(monkeypatch):
    """Make the forks of `compile_all` do something else than compile."""

    def use(function):
        monkeypatch.setattr(compile_worker, "_compile", function)

    return use


def test_forks_run_at_once_and_each_is_answered(compile_as, tmp_path):
    def compile_one(tile, package, target):
        (tmp_path / f"started-{package.stem}").touch()
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) >= 2)  # alone, none would end
        package.write_text(target["isa"])
        return 0

    compile_as(compile_one)
    tiles = [(str(t), str(p)) for t, p in jobs(tmp_path, 4)]
    answers = list(compile_worker.compile_all(tiles, {"isa": "avx2"}, at_once=2))
    assert sorted(a["package"] for a in answers) == sorted(p for _, p in tiles)
    assert {a["error"] for a in answers} == {None}


def test_a_fork_that_is_killed_is_an_answer(compile_as, tmp_path):
    compile_as(lambda tile, package, target: os.kill(os.getpid(), signal.SIGKILL))
    tiles = [(str(t), str(p)) for t, p in jobs(tmp_path, 1)]
    (answer,) = compile_worker.compile_all(tiles, {}, at_once=2)
    assert "exit code -9 while building 0.pt2" in answer["error"]


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
