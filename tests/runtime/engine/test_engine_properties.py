"""Random traffic through the core; every request must end as if it had run alone.

Two machines: the core as it is (plan, run, process outputs), and the scheduler with several plans
in flight, whose results come later. The fake runner's KV memory shows any block that was handed out
too early or cached with wrong content.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support_core import Collected, collect, make_core, make_request
from support_fake_runner import FakeRunner, fake_generate

from girih.kernels.kv.groups import FULL, KVCacheGroup, blocks_for

BLOCK_SIZE = 16
VOCAB_SIZE = 20  # small, so that stop ids are met
MAX_MODEL_LEN = 96
PLANS_IN_FLIGHT = 3
GROUPS = [
    (FULL,),
    (FULL, KVCacheGroup(window=20)),
    (KVCacheGroup(window=20),),
    (FULL, KVCacheGroup(window=3), KVCacheGroup(window=20), KVCacheGroup(window=20)),
    (FULL, KVCacheGroup(chunk=24)),
    (FULL, FULL, KVCacheGroup(window=17), KVCacheGroup(chunk=32)),
]
SHARED = [[(7 * i + k) % VOCAB_SIZE for i in range(64)] for k in range(3)]


class Traffic(RuleBasedStateMachine):
    """What both machines share: requests come, are aborted, the prefix cache is reset."""

    @initialize(
        num_spare_blocks=st.integers(0, 7),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        budget=st.sampled_from([96, 100, 128]),
        small_budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        threshold=st.sampled_from([0, 5, 16]),
        prefix_caching=st.booleans(),
        async_scheduling=st.booleans(),
        groups=st.sampled_from(GROUPS),
    )
    def start(
        self,
        num_spare_blocks,
        policy,
        chunked,
        budget,
        small_budget,
        max_num_seqs,
        threshold,
        prefix_caching,
        async_scheduling,
        groups,
    ):
        self.groups = groups
        lookahead = PLANS_IN_FLIGHT * (small_budget if chunked else budget)
        needed = blocks_for(groups, MAX_MODEL_LEN, BLOCK_SIZE, lookahead)
        self.core = make_core(
            num_blocks=1 + needed + num_spare_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=prefix_caching,
            runner=FakeRunner(BLOCK_SIZE, VOCAB_SIZE, groups=groups),
            groups=groups,
            plans_in_flight=PLANS_IN_FLIGHT,
            async_scheduling=async_scheduling,
            policy=policy,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=small_budget if chunked else budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
        )
        self.scheduler = self.core.scheduler
        self.sources = {}
        self.collected: dict[str, Collected] = {}
        self.aborted = set()
        self.num_failures = 0
        self.admitted = []
        self.plans = 0

    @rule(
        shared=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        switch=st.sampled_from([0, 16, 32]),
        num_shared=st.integers(0, 64),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8),
        max_tokens=st.one_of(st.none(), st.integers(1, 24)),
        min_tokens=st.integers(0, 8),
        stops=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        eos=st.integers(0, VOCAB_SIZE - 1),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 3),
        salt=st.sampled_from([None, None, "a"]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(
        self,
        shared,
        switch,
        num_shared,
        own,
        max_tokens,
        min_tokens,
        stops,
        eos,
        ignore_eos,
        priority,
        salt,
        prompt_logprobs,
    ):
        request_id = f"r{len(self.sources)}"
        source = make_request(
            request_id,
            (SHARED[shared[0]][:switch] + SHARED[shared[1]][switch:])[:num_shared] + own,
            priority=priority,
            arrival_time=float(len(self.sources)),
            eos_token_ids=(eos,),
            cache_salt=salt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            stop_token_ids=tuple(stops),
            ignore_eos=ignore_eos,
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
        )
        self.core.add_request(source)
        self.sources[request_id] = source

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        outputs = self.core.abort([request_id, "never seen"])
        assert [o.finish_reason for o in outputs] == ["abort"]
        collect(self.collected, outputs)
        self.aborted.add(request_id)

    @rule()
    def reset_prefix_cache(self):
        self.core.reset_prefix_cache()
        assert self.scheduler.kv_cache.pool.num_cached == 0

    def check_plan(self, plan):
        """Invariants 2, 4 and 7 and the budgets, as far as one plan shows them."""
        config = self.scheduler.config
        assert 0 < plan.total_tokens <= config.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= config.max_num_seqs
        assert plan.step_id == self.plans
        self.plans += 1
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            assert num_tokens > 0
            assert request.num_computed_tokens <= self.scheduler.kv_cache.num_slots(request)
            assert request.num_computed_tokens < MAX_MODEL_LEN
        for new in plan.new_requests:
            assert new.num_computed_tokens < len(new.token_ids)
            assert new.num_computed_tokens % BLOCK_SIZE == 0
            if new.sampling.prompt_logprobs is not None:
                assert new.num_computed_tokens == 0
            if new.request_id not in self.admitted:
                self.admitted.append(new.request_id)
        if config.policy == "fcfs":
            assert self.admitted == sorted(self.admitted, key=lambda i: int(i[1:]))

    @invariant()
    def core_agrees_with_itself(self):
        self.core.check_integrity()
        assert not self.core.runner.violations
        in_flight = {
            part.request.request_id: part.start
            for plan in reversed(self.scheduler._in_flight.values())
            for part in plan.parts
            if part.request.epoch == part.epoch
        }
        for request in self.scheduler.running:
            proved = in_flight.get(request.request_id, request.num_computed_tokens)
            self.check_kept_blocks(request, proved)

    def check_kept_blocks(self, request, num_proved):
        """Each group holds exactly the blocks that tokens from `num_proved` on see."""
        kv_cache = self.scheduler.kv_cache
        for number, group in enumerate(self.groups):
            table = request.blocks[number :: len(self.groups)]
            kept = [row for row, block in enumerate(table) if block.block_id != 0]
            first = group.first_needed(num_proved) // BLOCK_SIZE
            assert kept == list(range(first, len(table)))
            assert len(kept) <= group.most_blocks(BLOCK_SIZE, kv_cache.lookahead)

    def check_ends(self):
        """Each request gave exactly what it gives alone, or a prefix of it when aborted."""
        for request_id, source in self.sources.items():
            expected = fake_generate(source, VOCAB_SIZE, MAX_MODEL_LEN)
            entry = self.collected[request_id]
            if request_id in self.aborted or entry.finish_reason == "error":
                assert entry.finish_reason == ("abort" if request_id in self.aborted else "error")
                assert entry.finish_reason == "abort" or self.num_failures
                assert entry.tokens == expected[: len(entry.tokens)]
                continue
            assert entry.tokens == expected
            self.check_finish_reason(source, entry)
            logprobs = [lp.token_id for output in entry.outputs for lp in output.logprobs or []]
            assert logprobs == expected
            self.check_prompt_logprobs(source, entry)
        pool = self.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_usable

    def check_finish_reason(self, source, entry):
        last, sampling = entry.tokens[-1], source.sampling
        eos_token_ids = () if sampling.ignore_eos else source.eos_token_ids
        stop_ids = {*sampling.stop_token_ids, *eos_token_ids}
        stopped = last in stop_ids and len(entry.tokens) > sampling.min_tokens
        assert entry.finish_reason == ("stop" if stopped else "length")
        listed = stopped and last in sampling.stop_token_ids
        assert entry.outputs[-1].stop_reason == (last if listed else None)

    def check_prompt_logprobs(self, source, entry):
        first = entry.outputs[0].prompt_logprobs
        assert all(output.prompt_logprobs is None for output in entry.outputs[1:])
        if source.sampling.prompt_logprobs is None:
            assert first is None
        else:
            assert first[0] is None
            assert [lp.token_id for lp in first[1:]] == source.prompt_token_ids[1:]


class StepMachine(Traffic):
    """The core stepped as it is, with a runner in the caller's thread or in its own."""

    # Three in a row would end the core.
    @precondition(lambda self: self.scheduler.requests and self.core._failures_in_a_row < 2)
    @rule()
    def a_step_fails(self):
        """The next step that is run raises; its requests end with an error, no other does."""
        before = self.core.stats().num_failed_steps
        runner = self.core.runner
        while self.scheduler.num_in_flight:  # so that "next" is known
            self.core.pause()
            collect(self.collected, self.core.step())
        self.core.resume()
        runner.fail_at[runner.num_steps] = ValueError("made to fail")
        collect(self.collected, self.core.step())
        self.num_failures += self.core.stats().num_failed_steps - before
        assert self.core.failure is None
        collect(self.collected, self.core.step())

    @rule()
    def pause(self):
        """Nothing is planned until the core is resumed; what runs comes to its end."""
        self.core.pause()
        while self.core.has_work():
            collect(self.collected, self.core.step())
        assert self.scheduler.num_in_flight == 0
        assert self.core.step() == []
        self.core.resume()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            num_plans = len(self.core.runner.plans)
            collect(self.collected, self.core.step())
            self.core_agrees_with_itself()
            is_idle = self.scheduler.num_in_flight == 0  # else the runner may be ahead
            if is_idle and len(self.core.runner.plans) > num_plans:
                self.check_executed(self.core.runner.plans[-1])

    def check_executed(self, plan):
        alive = {
            request_id: n
            for request_id, n in plan.num_scheduled_tokens.items()
            if request_id in self.scheduler.requests
        }
        config = self.scheduler.config
        assert plan.total_tokens <= config.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= config.max_num_seqs
        for request_id in alive:
            row = self.core.runner.rows[request_id]
            request = self.scheduler.requests[request_id]
            assert row.num_computed_tokens == request.num_computed_tokens
            assert row.token_ids == request.token_ids
            assert request.num_placeholders == 0

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(4000):
            if not self.core.has_work():
                break
            collect(self.collected, self.core.step())
        self.core.close()
        self.core_agrees_with_itself()
        self.check_ends()


class PlansInFlightMachine(Traffic):
    """Up to three plans are made before the first one's result is processed."""

    @initialize()
    def nothing_in_flight(self):
        self.in_flight = []

    @precondition(lambda self: len(self.in_flight) < PLANS_IN_FLIGHT)
    @rule()
    def plan(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def digest(self):
        plan = self.in_flight.pop(0)
        collect(self.collected, self.scheduler.update(self.core.runner.execute(plan)))

    def teardown(self):
        if not hasattr(self, "in_flight") or not hasattr(self, "core"):
            return
        for _ in range(4000):
            if not self.core.has_work():
                break
            self.plan()
            if self.in_flight:
                self.digest()
            self.core_agrees_with_itself()
        while self.in_flight:
            self.digest()
        self.core_agrees_with_itself()
        self.check_ends()


def _settings(max_examples):
    return settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestStepMachine = StepMachine.TestCase
TestStepMachine.settings = _settings(80)
TestPlansInFlightMachine = PlansInFlightMachine.TestCase
TestPlansInFlightMachine.settings = _settings(80)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [StepMachine, PlansInFlightMachine])
def test_long_traffic(machine):
    """Tens of thousands of generated steps."""
    run_state_machine_as_test(machine, settings=_settings(700))
