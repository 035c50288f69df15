"""The core's calls: ends of requests, aborts at any moment, runners that raise, counters."""

from __future__ import annotations

import logging

import pytest
from support_core import collect, make_request, run_to_end
from support_fake_runner import FakeRunner, fake_generate

from girih.kernels.base.errors import EngineError
from girih.runtime.records.plans import ModelRunnerOutput


def counting_runner(**kwargs):
    """Next token = last token + 1."""
    return FakeRunner(16, 1000, next_token=lambda tokens: tokens[-1] + 1, **kwargs)


@pytest.mark.parametrize(
    ("fields", "tokens", "finish_reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [11, 12, 13], "length", None),
        ({"eos_token_ids": (12,)}, [11, 12], "stop", None),
        ({"eos_token_ids": (12,), "ignore_eos": True, "max_tokens": 4}, None, "length", None),
        ({"stop_token_ids": (13, 99)}, [11, 12, 13], "stop", 13),
        ({"stop_token_ids": (11, 14), "min_tokens": 1}, [11, 12, 13, 14], "stop", 14),
        ({"stop_token_ids": (12,), "min_tokens": 2, "max_tokens": 3}, None, "length", None),
        ({"stop_token_ids": (13,), "max_tokens": 3}, [11, 12, 13], "stop", 13),
        ({"max_tokens": None}, list(range(11, 33)), "length", None),
        ({"max_tokens": 500}, list(range(11, 33)), "length", None),
    ],
)
def test_ends(new_core, fields, tokens, finish_reason, stop_reason):
    core = new_core(max_model_len=32, runner=counting_runner())
    core.add_request(make_request("a", list(range(1, 11)), **fields))
    done = run_to_end(core)["a"]
    assert done.tokens == (tokens or list(range(11, 11 + fields["max_tokens"])))
    assert done.finish_reason == finish_reason
    assert done.outputs[-1].stop_reason == stop_reason


def test_min_tokens_counts_output_only(new_core):
    core = new_core(runner=counting_runner())
    core.add_request(make_request("a", [10], stop_token_ids=(12,), min_tokens=1))
    assert run_to_end(core)["a"].tokens == [11, 12]


def test_many_requests_equal_each_alone(new_core):
    core = new_core(num_blocks=24, max_num_batched_tokens=48, max_num_seqs=8)
    requests = [make_request(f"r{i}", 5 + 11 * i % 70, max_tokens=30) for i in range(20)]
    for request in requests:
        core.add_request(request)
    done = run_to_end(core)
    assert core.stats().num_preemptions > 0
    for request in requests:
        assert done[request.request_id].tokens == fake_generate(request, 1000, 256)


@pytest.mark.parametrize("case", range(4))
def test_tokens_are_the_same_with_asynchronous_scheduling(new_core, case):
    limits = {"num_blocks": 16 + 4 * case, "max_num_batched_tokens": 24 + 40 * case}
    requests = [
        make_request(
            f"r{i}",
            3 + 13 * i % 60,
            max_tokens=1 + 7 * i % 30,
            eos_token_ids=(i % 20,),
            min_tokens=i % 2,
        )
        for i in range(24)
    ]
    answers = []
    for is_async in (False, True):
        runner = FakeRunner(16, 20)
        core = new_core(**limits, max_num_seqs=6, runner=runner, async_scheduling=is_async)
        for request in requests:
            core.add_request(request)
        done = run_to_end(core)
        core.close()
        assert core.scheduler.num_in_flight == 0
        answers.append({i: (e.tokens, e.finish_reason) for i, e in done.items()})
    assert answers[0] == answers[1]
    assert {reason for _, reason in answers[0].values()} == {"stop", "length"}


def test_a_failing_step_spares_requests_of_the_plan_behind_it(new_core, caplog):
    caplog.set_level(logging.CRITICAL)
    runner = FakeRunner(16, fail_at={1: RuntimeError("tile 3 broke")})
    core = new_core(runner=runner, async_scheduling=True, max_num_batched_tokens=40, max_num_seqs=2)
    requests = [make_request(name, 30, max_tokens=4) for name in "abcd"]
    for request in requests:
        core.add_request(request)
    done = run_to_end(core)
    core.close()
    broken = [name for name, entry in done.items() if entry.finish_reason == "error"]
    assert broken and len(broken) < 4
    for request in requests:
        if request.request_id not in broken:
            assert done[request.request_id].tokens == fake_generate(request, 1000, 256)
    assert core.failure is None


def test_ends_told_to_a_failed_step_are_told_again(new_core, caplog):
    caplog.set_level(logging.CRITICAL)
    core = new_core(runner=FakeRunner(16, fail_at={1: ValueError("x")}), max_num_seqs=1)
    for name in "ab":
        core.add_request(make_request(name, max_tokens=1))
    core.step()  # ends a; the next plan tells, and fails before its rows are touched
    core.step()
    core.add_request(make_request("c", max_tokens=1))
    run_to_end(core)
    assert set(core.runner.plans[-1].finished_ids) == {"a", "b"}
    assert set(core.runner.rows) == {"c"}


def test_abort_waiting_running_and_unknown(new_core):
    core = new_core(max_num_seqs=1)
    for name in "abc":
        core.add_request(make_request(name, max_tokens=5))
    core.step()
    outputs = core.abort(["b", "a", "b", "nobody"])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("b", "abort"), ("a", "abort")]
    plan_before = len(core.runner.plans)
    done = run_to_end(core)
    assert core.runner.plans[plan_before].finished_ids == ("b", "a")
    assert set(done) == {"c"}
    assert not core.runner.rows.keys() & {"a", "b"}


def test_abort_with_a_plan_in_flight_drops_its_result_and_spares_a_namesake(new_core):
    core = new_core()
    core.add_request(make_request("a", 4, max_tokens=5))
    core.step()
    late = core.scheduler.schedule()
    core.abort(["a"])
    namesake = make_request("a", 40, max_tokens=5)
    core.add_request(namesake)
    plan = core.scheduler.schedule()
    assert plan.finished_ids == ("a",)
    collected = {}
    for pending in (late, plan):
        collect(collected, core.scheduler.update(core.runner.execute(pending)))
    assert collected["a"].tokens == fake_generate(namesake, 1000, 256)[:1]
    rest = run_to_end(core)["a"].tokens
    assert collected["a"].tokens + rest == fake_generate(namesake, 1000, 256)


def test_preempted_with_a_plan_in_flight_samples_its_token_again(new_core):
    core = new_core(num_blocks=4, enable_prefix_caching=False)  # 3 usable blocks of 16
    requests = [make_request(name, 15, max_tokens=20, ignore_eos=True) for name in "ab"]
    for request in requests:
        core.add_request(request)
    in_flight, collected = [], {}
    for _ in range(200):
        plan = core.scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == 3):
            collect(collected, core.scheduler.update(core.runner.execute(in_flight.pop(0))))
        core.check_integrity()
        if not core.has_work():
            break
    assert core.stats().num_preemptions > 0
    for plan in in_flight:
        assert core.scheduler.update(core.runner.execute(plan)) == []
    for request in requests:
        assert collected[request.request_id].tokens == fake_generate(request, 1000, 256)


def test_a_failing_step_ends_its_requests_and_the_core_goes_on(new_core, caplog):
    caplog.set_level(logging.CRITICAL)
    runner = FakeRunner(16, fail_at={1: RuntimeError("tile 3 broke")})
    core = new_core(runner=runner, max_num_seqs=1)
    core.add_request(make_request("a", max_tokens=5))
    core.add_request(make_request("b", max_tokens=5))
    core.step()
    (output,) = core.step()
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert output.error == "RuntimeError: tile 3 broke"
    done = run_to_end(core)
    assert done["b"].tokens == fake_generate(make_request("b", max_tokens=5), 1000, 256)
    stats = core.stats()
    assert (stats.num_failed_steps, stats.finished) == (1, {"error": 1, "length": 1})
    assert core.failure is None


@pytest.mark.parametrize(
    ("failures", "num_steps"),
    [({0: EngineError("device lost")}, 1), (dict.fromkeys(range(3), ValueError("x")), 3)],
    ids=["EngineError at once", "three in a row"],
)
def test_core_death_ends_every_request_and_refuses_work(new_core, caplog, failures, num_steps):
    caplog.set_level(logging.CRITICAL)
    core = new_core(runner=FakeRunner(16, fail_at=failures), max_num_seqs=1)
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        core.add_request(make_request(name))
    outputs = [output for _ in range(num_steps) for output in core.step()]
    assert sorted(output.request_id for output in outputs) == names
    assert {output.finish_reason for output in outputs} == {"error"}
    assert not core.has_work()
    for call in (core.step, lambda: core.add_request(make_request("f"))):
        with pytest.raises(EngineError, match="core died"):
            call()


def test_an_interrupt_leaves_the_core_usable(new_core):
    core = new_core(runner=FakeRunner(16, fail_at={2: KeyboardInterrupt()}))
    requests = [make_request(name, 20, max_tokens=5) for name in "ab"]
    for request in requests:
        core.add_request(request)
    collected = {}
    for _ in range(2):
        collect(collected, core.step())
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.check_integrity()
    assert core.scheduler.num_in_flight == 0
    rest = run_to_end(core)
    for request in requests:
        name = request.request_id
        assert collected[name].tokens + rest[name].tokens == fake_generate(request, 1000, 256)


def test_a_result_without_the_token_ends_that_request_only(new_core):
    core = new_core()
    core.add_request(make_request("a", max_tokens=2))
    core.add_request(make_request("b", max_tokens=2))
    plan = core.scheduler.schedule()
    outputs = core.scheduler.update(ModelRunnerOutput(plan.step_id, {"b": [5]}))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", None)]
    assert "no token" in outputs[0].error
    core.abort(["b"])


def test_stats(new_core):
    core = new_core(max_num_seqs=1)
    core.add_request(make_request("a", 20, max_tokens=3))
    core.add_request(make_request("b", 10, max_tokens=3))
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (20, 1)
    assert stats.run_seconds > 0
    run_to_end(core)
    stats = core.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (30, 6)
    assert stats.finished == {"length": 2}
    assert core.step() == []
