"""Requests that wait for something outside: they hold up nobody and can be aborted."""

from __future__ import annotations

import pytest
from support_core import make_request, run_to_end

from girih.kernels.base.errors import QueueFullError
from girih.runtime.records.request import RequestStatus
from girih.runtime.records.structured_output import StructuredOutput

FORM = StructuredOutput.json_object()


class SlowGrammars:
    """Structured requests wait until `is_open`."""

    def __init__(self):
        self.is_open = False
        self.waits = 0
        self.callbacks = []

    def start(self, sampling):
        return None if sampling.structured is None else self

    def done(self):
        return self.is_open

    def wait(self, seconds):
        self.waits += 1

    def on_ready(self, callback):
        self.callbacks.append(callback)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(new_core, request):
    core = new_core(async_scheduling=request.param)
    core.scheduler.pending_grammars = SlowGrammars()
    yield core
    core.close()


def test_a_blocked_request_holds_up_nobody(core):
    core.add_request(make_request("blocked", structured=FORM, max_tokens=3))
    core.add_request(make_request("free", max_tokens=3))
    assert core.stats().num_waiting == 2
    outputs = [output for _ in range(4) for output in core.step()]
    assert {output.request_id for output in outputs} == {"free"}
    assert core.scheduler.requests["blocked"].status is RequestStatus.BLOCKED
    core.check_integrity()
    core.scheduler.pending_grammars.is_open = True
    assert set(run_to_end(core)) == {"blocked"}


def test_only_blocked_requests_make_a_step_wait(core):
    core.add_request(make_request("blocked", structured=FORM))
    assert core.has_work()
    assert core.step() == []
    assert core.scheduler.pending_grammars.waits == 1


def test_abort_while_blocked(core):
    core.add_request(make_request("blocked", structured=FORM))
    [output] = core.abort(["blocked"])
    assert output.finish_reason == "abort"
    assert not core.has_work()


def test_blocked_requests_count_as_waiting(new_core):
    core = new_core(max_num_waiting=1)
    core.scheduler.pending_grammars = SlowGrammars()
    core.add_request(make_request("blocked", structured=FORM))
    with pytest.raises(QueueFullError):
        core.add_request(make_request("other"))


def test_the_core_passes_its_callback_on(core):
    def wake():
        pass

    core.on_result(wake)
    assert core.scheduler.pending_grammars.callbacks == [wake]
