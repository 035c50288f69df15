"""Seconds per stage: stages of one name add up, and a failing one adds nothing."""

import time

import pytest

from girih.kernels.base.seconds import timed


def test_stages_of_one_name_add_up_and_a_failing_one_adds_nothing(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    seconds = {}
    for _ in range(2):
        with timed(seconds, "bind"):
            pass
    with pytest.raises(ValueError, match="broken"), timed(seconds, "canary"):
        raise ValueError("broken")
    assert seconds == {"bind": 6.0}
