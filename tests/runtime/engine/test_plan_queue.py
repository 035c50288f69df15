"""Order of plans and outcomes, here and in a thread of its own."""

import threading

import pytest

from girih.runtime.engine.plan_queue import InlinePlanQueue, ThreadedPlanQueue
from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput


def plan(step_id):
    return SchedulerOutput(step_id, (), (), {}, (), ())


class Runner:
    """Answers with the plan's number; waits for `gate`; raises for the steps in `broken`."""

    def __init__(self, broken=(), gate=None):
        self.broken, self.gate = broken, gate
        self.executed = []

    def execute(self, step):
        if self.gate is not None:
            assert self.gate.wait(10)
        self.executed.append((step.step_id, threading.get_ident()))
        if step.step_id in self.broken:
            raise ValueError(f"step {step.step_id}")
        return ModelRunnerOutput(step.step_id, {})


@pytest.fixture(params=[InlinePlanQueue, ThreadedPlanQueue])
def make_queue(request):
    made = []

    def make(runner):
        made.append(request.param(runner))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_outcomes_come_in_order(make_queue):
    queue = make_queue(Runner())
    for step_id in range(3):
        queue.submit(plan(step_id))
    for step_id in range(3):
        finished = queue.wait()
        assert finished.result.step_id == step_id
        assert finished.started <= finished.ended
        queue.forget(1)
    assert not queue.has_result()


def test_plans_behind_a_failure_are_not_run(make_queue):
    runner = Runner(broken=[0])
    queue = make_queue(runner)
    for step_id in range(3):
        queue.submit(plan(step_id))
    with pytest.raises(ValueError):
        queue.wait()
    queue.forget(3)
    queue.submit(plan(3))
    assert queue.wait().result.step_id == 3
    assert [step_id for step_id, _ in runner.executed] == [0, 3]


def test_an_error_stays_until_it_is_forgotten_with_the_plans_behind_it(make_queue):
    queue = make_queue(Runner(broken=[1]))
    for step_id in range(3):
        queue.submit(plan(step_id))
    assert queue.wait().result.step_id == 0
    queue.forget(1)
    with pytest.raises(ValueError, match="step 1"):
        queue.wait()
    queue.forget(2)
    queue.submit(plan(3))
    assert queue.wait().result.step_id == 3
    queue.forget(1)
    assert not queue.has_result()


def test_a_thread_runs_plans_beside_the_caller_and_says_when_one_is_done():
    gate, done = threading.Event(), threading.Semaphore(0)
    runner = Runner(gate=gate)
    queue = ThreadedPlanQueue(runner, on_result=done.release)
    for step_id in range(3):
        queue.submit(plan(step_id))
    assert not queue.has_result()
    queue.forget(1)  # before it has run
    gate.set()
    for _ in range(3):
        assert done.acquire(timeout=10)
    assert queue.has_result()
    assert queue.wait().result.step_id == 1
    queue.forget(2)
    assert not queue.has_result()
    queue.close()
    assert [step_id for step_id, _ in runner.executed] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in runner.executed}


def test_a_failure_nobody_waited_for_does_not_hit_later_plans():
    gate = threading.Event()
    queue = ThreadedPlanQueue(Runner(broken=[0], gate=gate))
    queue.submit(plan(0))
    queue.forget(1)
    queue.submit(plan(1))
    gate.set()
    assert queue.wait().result.step_id == 1
    queue.close()
