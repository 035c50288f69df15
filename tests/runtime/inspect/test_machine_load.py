"""What other processes use of the machine, from the counters of Linux."""

import os

import pytest

from girih.runtime.inspect import machine_load
from girih.runtime.inspect.machine_load import OtherWork

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two processors of ours and one that is not; nobody works until `spend`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    clock = [100.0]
    own = [5.0]
    monkeypatch.setattr(machine_load.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(machine_load, "_own", lambda: own[0])
    busy = {0: 50.0, 1: 70.0, 2: 90.0}

    class Machine:
        stat = tmp_path / "stat"

        def spend(self, seconds, mine, **others):
            clock[0] += seconds
            own[0] += mine
            for name, value in others.items():
                busy[int(name[3:])] += value
            rows = ["cpu  9 9 9 9 9 9 9 9 0 0"]
            for number, total in busy.items():
                ticks = int(total * TICKS)  # half by users, the rest by interrupts; idle counts not
                rows.append(f"cpu{number} {ticks // 2} 0 0 777 888 {ticks - ticks // 2} 0 0 5 5")
            self.stat.write_text("\n".join([*rows, "intr 1 2 3"]))

    machine = Machine()
    machine.spend(0, 0)
    return machine


def test_what_others_did_on_our_processors_is_counted(machine):
    others = OtherWork(machine.stat)
    assert others.processors == 2
    machine.spend(10.0, mine=4.0, cpu0=10.0, cpu1=10.0, cpu2=6.0)
    assert others.average() == pytest.approx(1.2)
    assert "other processes kept 1.2 of 2 processors busy" in others.remark()


def test_our_own_work_is_no_reason_for_a_remark(machine):
    others = OtherWork(machine.stat)
    machine.spend(10.0, mine=19.0, cpu0=10.0, cpu2=10.0)
    assert others.average() == pytest.approx(0.1)
    assert others.remark() == ""


def test_a_system_without_these_counters_gets_no_remark(tmp_path):
    others = OtherWork(tmp_path / "none")
    assert others.average() is None
    assert others.remark() == ""


def test_this_machine_is_understood():
    others = OtherWork()
    average = others.average()
    assert average is None or average >= 0
