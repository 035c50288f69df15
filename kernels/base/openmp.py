"""The OpenMP threads: how long they spin, and which thread's team they belong to.

libgomp, which torch, its compiled tiles and our kernels share, keeps a team of threads for every
thread that ever ran a parallel region. Between regions the team spins for a while, then sleeps;
waking it takes longer than most kernels of a decode step. Two rules keep that cheap:

- libgomp all but stops spinning as soon as its teams together have more threads than the machine.
  So work that needs a team only once runs in `with_own_team`, and the team goes with it.
- The spin is bounded. Left alone it lasts several milliseconds, in which a thread on a busy machine
  keeps the one it waits for from running.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Turns of one `pause` each, which takes 10 ns on a Xeon with AMX (so 50 us) and a few times as long
# on some older ones: more than the gaps between the regions of a step, less than an idle engine's.
SPIN_TURNS = 5000
UNWIND_SECONDS = 5.0  # an interrupted thread that has not ended by then is left behind


def configure() -> None:
    """Say how OpenMP's threads wait, unless the environment does or torch has loaded OpenMP."""
    if "torch" in sys.modules or "OMP_WAIT_POLICY" in os.environ:
        return
    # With too many threads, an active policy leaves 1,000 turns, and the default one 100.
    os.environ["OMP_WAIT_POLICY"] = "active"
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_TURNS))


def with_own_team(work: Callable[[], T]) -> T:
    """Run `work` in a thread that ends with it, and with that thread its OpenMP team.

    An exception of this thread meanwhile, as from Ctrl-C, is raised in the other one too.

    Raises:
        BaseException: what `work` raised.
    """
    result: list[T] = []
    failure: list[BaseException] = []
    ended = threading.Event()  # an interrupted `join` would take the thread for ended

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="girih-own-team", daemon=True)
    try:
        thread.start()
        ended.wait()
    except BaseException as error:
        _raise_in(thread, type(error))
        ended.wait(UNWIND_SECONDS)
        raise
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
