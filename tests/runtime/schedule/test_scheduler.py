"""What each step plans: budgets, chunks, policies, preemption, admission."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from support_core import make_request, run_to_end
from support_fake_runner import fake_generate

from girih.kernels.base.errors import EngineError, QueueFullError, RequestError
from girih.runtime.records.plans import ModelRunnerOutput
from girih.runtime.schedule.prefill_budget import LEAST_TOKENS
from girih.runtime.schedule.waiting_queue import FcfsQueue


def plan_of(core):
    """Step once and return the plan that ran."""
    core.step()
    return core.runner.plans[-1]


def add(core, *requests):
    for request in requests:
        core.add_request(request)


def test_core_imports_without_torch():
    code = (
        "import sys, girih.runtime.engine.core, girih.runtime.schedule.scheduler; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prefill_and_decode_share_a_step(new_core):
    core = new_core(max_num_batched_tokens=32)
    add(core, make_request("a", 10))
    assert plan_of(core).num_scheduled_tokens == {"a": 10}
    add(core, make_request("b", 40))
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": 31}
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": 9}
    plan = plan_of(core)
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
    assert [update.num_computed_tokens for update in plan.running] == [12, 40]


def test_no_more_than_max_num_seqs_run(new_core):
    core = new_core(max_num_seqs=2)
    add(core, *(make_request(name, 4, max_tokens=3) for name in "abc"))
    assert list(plan_of(core).num_scheduled_tokens) == ["a", "b"]
    plan_of(core)
    plan_of(core)
    plan = plan_of(core)
    assert set(plan.finished_ids) == {"a", "b"}
    assert list(plan.num_scheduled_tokens) == ["c"]


def test_long_prefill_threshold_applies_only_while_others_answer(new_core):
    core = new_core(max_num_batched_tokens=64, long_prefill_token_threshold=8)
    add(core, make_request("a", 150, max_tokens=4), make_request("b", 6, max_tokens=4))
    assert plan_of(core).num_scheduled_tokens == {"a": 64}
    core.abort(["a"])
    assert plan_of(core).num_scheduled_tokens == {"b": 6}
    add(core, make_request("c", 100, max_tokens=4), make_request("d", 7, max_tokens=4))
    assert plan_of(core).num_scheduled_tokens == {"b": 1, "c": 8, "d": 7}
    core.abort(["b", "d"])
    assert plan_of(core).num_scheduled_tokens == {"c": 64}
    assert plan_of(core).num_scheduled_tokens == {"c": 28}


def test_prompts_share_what_the_target_leaves_beside_answers(new_core):
    core = new_core(max_num_batched_tokens=64, target_step_ms=100.0)
    core.scheduler.prefill_budget.learn = lambda *step: None  # steps of no length would raise it
    add(core, make_request("a", 30, max_tokens=9))
    assert plan_of(core).num_scheduled_tokens == {"a": 30}  # nobody waits for the step
    add(core, *(make_request(name, 20, max_tokens=4) for name in "bcd"))
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": LEAST_TOKENS}
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": 4, "c": LEAST_TOKENS - 4}
    core.abort(["a", "b"])
    assert plan_of(core).num_scheduled_tokens == {"c": 8, "d": 20}


def test_without_a_target_a_step_takes_all_that_fits(new_core):
    core = new_core(max_num_batched_tokens=64)
    add(core, make_request("a", 30, max_tokens=9))
    core.scheduler.learn_step_time(plan_of(core), 60.0)
    add(core, make_request("b", 100, max_tokens=4))
    core.scheduler.learn_step_time(plan_of(core), 60.0)
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": 100 - 63}


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole(new_core):
    core = new_core(enable_chunked_prefill=False, max_num_batched_tokens=20)
    add(core, make_request("a", 15), make_request("b", 12), make_request("c", 2))
    assert plan_of(core).num_scheduled_tokens == {"a": 15}  # c may not overtake b
    assert plan_of(core).num_scheduled_tokens == {"a": 1, "b": 12, "c": 2}
    with pytest.raises(RequestError, match=r"21 tokens.*at most.*\(20\)") as caught:
        core.add_request(make_request("d", 21))
    assert caught.value.param == "prompt"


def test_without_chunks_a_preempted_request_that_outgrew_the_budget_comes_back(new_core):
    core = new_core(
        num_blocks=6, enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=64
    )
    requests = [make_request(n, 14, max_tokens=40, ignore_eos=True) for n in "ab"]
    add(core, *requests)
    done = run_to_end(core)
    assert core.stats().num_preemptions > 0
    for request in requests:
        assert done[request.request_id].tokens == fake_generate(request, 1000, 64)


def test_fcfs_preempts_the_last_running_and_brings_it_back_first(new_core):
    core = new_core(num_blocks=5, enable_prefix_caching=False)  # 4 usable blocks of 16
    add(core, *(make_request(name, 15, max_tokens=8) for name in "abc"))
    while not core.stats().num_preemptions:
        plan = plan_of(core)
    assert plan.preempted_ids == ("c",)
    add(core, make_request("d", 3, max_tokens=2))
    assert plan.new_requests == ()  # nobody is admitted in a step that preempted
    victim = core.scheduler.requests["c"]
    assert victim.num_computed_tokens == 0
    assert victim.num_output_tokens > 0
    assert core.scheduler.waiting.peek() is victim
    while not plan.new_requests:
        plan = plan_of(core)
    back = plan.new_requests[0]
    assert back.request_id == "c"
    assert back.num_prompt_tokens == 15
    assert len(back.token_ids) > 15
    assert core.scheduler.requests["c"].num_preemptions == 1
    run_to_end(core)


def test_priority_admits_the_lowest_number_then_the_earliest(new_core):
    core = new_core(policy="priority", max_num_seqs=1)
    add(
        core,
        make_request("late", 4, priority=1, arrival_time=2.0, max_tokens=1),
        make_request("low", 4, priority=5, arrival_time=0.0, max_tokens=1),
        make_request("early", 4, priority=1, arrival_time=1.0, max_tokens=1),
        make_request("urgent", 4, priority=-3, arrival_time=9.0, max_tokens=1),
    )
    order = [next(iter(plan_of(core).num_scheduled_tokens)) for _ in range(4)]
    assert order == ["urgent", "early", "late", "low"]


def test_priority_victim_gives_back_what_this_step_had_planned_for_it(new_core):
    core = new_core(num_blocks=4, policy="priority", enable_prefix_caching=False)
    add(core, make_request("worst", 15, priority=9, max_tokens=8, ignore_eos=True))
    plan_of(core)  # runs first, so it is planned first
    add(core, make_request("best", 16, priority=0, max_tokens=30, ignore_eos=True))
    add(core, make_request("good", 2, priority=1, max_tokens=30, ignore_eos=True))
    plan = plan_of(core)
    assert list(plan.num_scheduled_tokens) == ["worst", "best"]
    plan = plan_of(core)
    assert list(plan.num_scheduled_tokens) == ["best"]
    assert plan.preempted_ids == ("worst",)
    assert [update.request_id for update in plan.running] == ["best"]
    assert core.scheduler.requests["worst"].num_computed_tokens == 0
    assert core.scheduler.requests["worst"].blocks == []
    run_to_end(core)


def test_nobody_is_admitted_in_a_step_that_preempted(new_core):
    core = new_core(num_blocks=5, policy="priority", enable_prefix_caching=False)
    add(core, make_request("best", 16, priority=0), make_request("worst", 32, priority=9))
    plan_of(core)
    add(core, make_request("middle", 2, priority=5))
    plan = plan_of(core)  # "best" takes the last block, "worst" gives its own up
    assert plan.preempted_ids == ("worst",)
    assert list(plan.num_scheduled_tokens) == ["best"]
    assert list(plan_of(core).num_scheduled_tokens) == ["best", "middle"]
    run_to_end(core)


def test_tokens_a_victim_gives_back_go_to_others_in_the_same_step(new_core):
    core = new_core(num_blocks=5, policy="priority", enable_prefix_caching=False)
    for name, priority, length in (("worst", 9, 16), ("best", 0, 16), ("good", 1, 2)):
        request = make_request(name, length, priority=priority, arrival_time=-priority)
        add(core, request)
    core.scheduler.waiting = FcfsQueue()  # admit in this order, so that "worst" is planned first
    for request in core.scheduler.requests.values():
        core.scheduler.waiting.add(request)
    assert list(plan_of(core).num_scheduled_tokens) == ["worst", "best", "good"]
    core.scheduler.config = dataclasses.replace(core.scheduler.config, max_num_batched_tokens=2)
    plan = plan_of(core)  # "worst" takes the last block, then "best" needs one
    assert plan.preempted_ids == ("worst",)
    assert plan.num_scheduled_tokens == {"best": 1, "good": 1}
    run_to_end(core)


def test_whole_sequence_must_fit_before_it_is_admitted(new_core):
    core = new_core(num_blocks=8, max_num_batched_tokens=16, enable_prefix_caching=False)
    add(core, make_request("a", 60, max_tokens=4), make_request("b", 60, max_tokens=4))
    for _ in range(4):
        assert list(plan_of(core).num_scheduled_tokens) == ["a"]
    run_to_end(core)
    assert core.stats().num_preemptions == 0


def test_watermark_keeps_blocks_for_growth_only_while_something_runs(new_core):
    core = new_core(num_blocks=5, enable_prefix_caching=False)
    add(core, make_request("a", 16, max_tokens=3), make_request("b", 48, max_tokens=3))
    assert list(plan_of(core).num_scheduled_tokens) == ["a"]  # b would leave nothing free
    core.abort(["a"])
    assert list(plan_of(core).num_scheduled_tokens) == ["b"]
    run_to_end(core)


@pytest.mark.parametrize(
    ("fields", "num_blocks", "message", "param"),
    [
        ({"prompt": []}, 64, "prompt is empty", "prompt"),
        ({"prompt": 64}, 64, "max_model_len allows 64 .* at most 63", "prompt"),
        ({"prompt": 33}, 3, "KV cache allows 33 .* at most 32", "prompt"),
        ({"prompt": 20, "max_tokens": 14}, 3, "at most 33 tokens", "max_tokens"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_limit(
    new_core, fields, num_blocks, message, param
):
    core = new_core(num_blocks=num_blocks, max_model_len=64)
    with pytest.raises(RequestError, match=message) as caught:
        core.add_request(make_request("a", **fields))
    assert caught.value.param == param
    assert not core.has_work()


def test_the_largest_request_that_fits_runs(new_core):
    core = new_core(num_blocks=3, max_model_len=64)
    add(core, make_request("a", 20, max_tokens=13), make_request("b", 32, max_tokens=1))
    add(core, make_request("c", 3, max_tokens=None))
    done = run_to_end(core)
    assert [len(done[name].tokens) for name in "abc"] == [13, 1, 30]
    assert {entry.finish_reason for entry in done.values()} == {"length"}


def test_full_queue_and_taken_id_are_refused(new_core):
    core = new_core(max_num_waiting=2, max_num_seqs=1)
    add(core, make_request("a"), make_request("b"))
    with pytest.raises(QueueFullError, match="max_num_waiting is 2"):
        core.add_request(make_request("c"))
    with pytest.raises(RequestError, match="unfinished request"):
        core.add_request(make_request("a"))
    core.step()
    add(core, make_request("c"))
    run_to_end(core)
    add(core, make_request("a"))  # ids of finished requests are free again
    run_to_end(core)


def test_results_are_paired_with_plans_in_order(new_core):
    core = new_core()
    add(core, make_request("a", 4, max_tokens=3))
    first, second = core.scheduler.schedule(), core.scheduler.schedule()
    assert (first.step_id, second.step_id) == (0, 1)
    assert second.num_scheduled_tokens == {"a": 1}  # for the token the first plan will sample
    with pytest.raises(EngineError, match=r"a result for step 1 came; the oldest .* is 0"):
        core.scheduler.update(ModelRunnerOutput(1, {"a": [5]}))
    for plan in (first, second):
        core.scheduler.update(core.runner.execute(plan))
    run_to_end(core)


def test_no_plan_goes_past_the_last_token_that_results_in_flight_bring(new_core):
    core = new_core()
    add(core, make_request("a", 4, max_tokens=2))
    plans = [core.scheduler.schedule() for _ in range(3)]
    assert plans[2] is None
    outputs = [core.scheduler.update(core.runner.execute(plan)) for plan in plans[:2]]
    assert [o.finish_reason for batch in outputs for o in batch] == [None, "length"]


def test_roll_back_restores_progress_exactly(new_core):
    core = new_core(max_num_batched_tokens=8)
    add(core, make_request("a", 12, max_tokens=4), make_request("b", 5, max_tokens=4))
    core.step()
    request = core.scheduler.requests["a"]
    before = (request.num_computed_tokens, request.num_placeholders)
    plans = [core.scheduler.schedule(), core.scheduler.schedule()]
    assert request.num_computed_tokens == 13
    assert set(core.scheduler.roll_back(plans[0].step_id)) == {"a", "b"}
    assert (request.num_computed_tokens, request.num_placeholders) == before
    assert core.scheduler.num_in_flight == 0
    again = core.scheduler.schedule()
    assert again.num_scheduled_tokens == plans[0].num_scheduled_tokens
    core.scheduler.roll_back(again.step_id)
    core.abort(["a", "b"])


def test_what_a_voided_plan_told_of_preempted_and_ended_requests_is_told_again(new_core):
    core = new_core(num_blocks=5, policy="priority", enable_prefix_caching=False)
    add(core, make_request("best", 16, priority=0), make_request("worst", 32, priority=9))
    plan_of(core)
    plan = core.scheduler.schedule()  # "best" takes the last block, "worst" gives its own up
    assert plan.preempted_ids == ("worst",)
    core.abort(["worst"])
    later = core.scheduler.schedule()
    assert later.finished_ids == ("worst",)
    core.scheduler.roll_back(plan.step_id)
    again = core.scheduler.schedule()
    assert (again.preempted_ids, again.finished_ids) == (("worst",), ("worst",))
    core.scheduler.roll_back(again.step_id)
    core.abort(["best"])


def test_several_tokens_per_result_are_cut_at_the_first_that_ends_the_request(new_core):
    core = new_core()
    add(core, make_request("a", 4, max_tokens=8, stop_token_ids=(7,)))
    plan = core.scheduler.schedule()
    (output,) = core.scheduler.update(ModelRunnerOutput(plan.step_id, {"a": [3, 7, 9]}))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([3, 7], "stop", 7)
