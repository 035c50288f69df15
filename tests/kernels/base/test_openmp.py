import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from girih.kernels.base.openmp import SPIN_TURNS, with_own_team

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def variables_after(code, **environment):
    """The two variables in a new process that ran `code`."""
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES} | environment
    script = f"import json, os; {code}; print(json.dumps([os.environ.get(v) for v in {VARIABLES}]))"
    run = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, check=True)
    return json.loads(run.stdout)


def test_threads_wait_actively_for_a_bounded_time():
    assert variables_after("import girih") == ["active", str(SPIN_TURNS)]


def test_a_policy_of_the_environment_is_kept():
    assert variables_after("import girih", OMP_WAIT_POLICY="passive") == ["passive", None]
    assert variables_after("import girih", GOMP_SPINCOUNT="7") == ["active", "7"]


def test_nothing_is_set_where_it_would_come_too_late():
    assert variables_after("import torch, girih") == [None, None]


TEAM = """
import os, time, girih, torch
from girih.kernels.base.openmp import with_own_team
torch.set_num_threads(3)
tasks = lambda: len(os.listdir("/proc/self/task"))
def region():
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)
    return tasks()
before = tasks()
within = with_own_team(region)
until = time.monotonic() + 60
while tasks() > before and time.monotonic() < until:
    time.sleep(0.01)
print(within - before, tasks() - before)
"""


def test_a_team_ends_with_its_thread():
    run = subprocess.run([sys.executable, "-c", TEAM], capture_output=True, check=True, text=True)
    assert run.stdout.split() == ["3", "0"]  # the thread and its two helpers, then none of them


def test_result_and_error_are_those_of_the_work():
    assert with_own_team(lambda: threading.current_thread().name) == "girih-own-team"
    with pytest.raises(ZeroDivisionError):
        with_own_team(lambda: 1 // 0)


def test_an_interrupt_ends_the_work_too():
    seen = []

    def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            seen.append("interrupted")
            raise

    with pytest.raises(KeyboardInterrupt):
        with_own_team(work)
    assert seen == ["interrupted"]
