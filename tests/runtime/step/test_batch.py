"""The persistent batch: what a step's tensors say, rows that come and go, whole runs."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from support_core import make_request, run_to_end
from support_fake_runner import fake_generate
from support_tensor_runner import TensorFakeRunner

from girih.kernels.base.errors import EngineError, RequestError
from girih.kernels.kv.groups import FULL, KVCacheGroup
from girih.runtime.records.plans import (
    ModelRunnerOutput,
    NewRequest,
    RunningUpdate,
    SchedulerOutput,
)
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.sample.sampler import GREEDY, SamplerOutput
from girih.runtime.step.batch import PersistentBatch

VOCAB_SIZE = 200


def new_request(request_id, token_ids, block_ids, computed=0, num_prompt=None, **sampling):
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt or len(token_ids),
        sampling=SamplingParams(**{"temperature": 0, **sampling}),
        stop_token_ids=(),
        block_ids=block_ids,
        num_computed_tokens=computed,
    )


def plan(step_id, new=(), running=(), scheduled=None, finished=(), preempted=()):
    updates = tuple(RunningUpdate(*entry) for entry in running)
    return SchedulerOutput(step_id, tuple(new), updates, scheduled, finished, preempted)


def prepare(batch, plan):
    batch.update(plan)
    return batch.gather(plan, list(plan.num_scheduled_tokens))


def kv_places(step):
    """Block tables and slots of each KV group."""
    attention = step.inputs.attention
    return [t.tolist() for t in attention.block_tables], [
        s.tolist() for s in attention.slot_mappings
    ]


def sampling(batch, step):
    return batch.sampling(step, slice(None))


def commit(batch, step, tokens):
    result = ModelRunnerOutput(step_id=0)
    sampled = SamplerOutput(torch.tensor(tokens, dtype=torch.int64), None)
    batch.advance(step)
    batch.commit(step, slice(None), sampled, result)
    return result


def make_batch(max_num_seqs=4):
    return PersistentBatch(max_num_seqs, 64, 16, VOCAB_SIZE)


def test_mixed_step_is_packed_without_padding():
    batch = make_batch()
    step = prepare(
        batch,
        plan(
            0,
            [
                new_request("a", [*range(40)], [3, 1, 5], computed=16),
                new_request("b", [7, 8], [2]),
            ],
            scheduled={"a": 20, "b": 2},
        ),
    )
    attention = step.inputs.attention
    assert attention.query_start.tolist() == [0, 20, 22]
    assert attention.seq_lens.tolist() == [36, 2]
    assert step.inputs.ids.tolist() == [*range(16, 36), 7, 8]
    assert step.inputs.positions.tolist() == [*range(16, 36), 0, 1]
    slots = [*range(16, 32), *range(80, 84), 32, 33]
    assert kv_places(step) == ([[[3, 1, 5], [2, 0, 0]]], [slots])
    assert step.inputs.logits_index.tolist() == [21]  # a's last known token is not in the step
    assert step.sampled_ids == ["b"]
    result = commit(batch, step, [9])
    assert result.sampled_token_ids == {"b": [9]}
    step = prepare(
        batch, plan(1, running=[("a", (), 36), ("b", (), 2)], scheduled={"b": 1, "a": 4})
    )
    assert step.inputs.ids.tolist() == [9, 36, 37, 38, 39]  # in the plan's order
    assert step.inputs.logits_index.tolist() == [0, 4]
    assert step.sampled_ids == ["b", "a"]


def test_several_kv_groups_have_tables_and_slots_of_their_own():
    batch = PersistentBatch(4, 64, 16, VOCAB_SIZE, num_groups=2)
    new = [new_request("a", [*range(20)], [3, 4, 5, 6], computed=16), new_request("b", [7], [8, 9])]
    step = prepare(batch, plan(0, new, scheduled={"b": 1, "a": 4}))
    tables = [[[8, 0], [3, 5]], [[9, 0], [4, 6]]]
    assert kv_places(step) == (tables, [[128, *range(80, 84)], [144, *range(96, 100)]])
    commit(batch, step, [1, 1])
    one = prepare(batch, plan(1, running=[("b", (), 1)], scheduled={"b": 1}))
    attention = one.inputs.attention
    assert {t.stride() for t in attention.block_tables} == {(1, 1)}
    assert {s.stride() for s in attention.slot_mappings} == {(1,)}
    running = [("a", (), 20), ("b", (), 1)]
    prepare(batch, plan(1, running=running, scheduled={"a": 1, "b": 1}))
    new = [new_request("c", [5], [1, 2])]
    moved = plan(2, new, [("b", (), 1)], scheduled={"c": 1, "b": 1}, finished=("a",))
    assert kv_places(prepare(batch, moved)) == ([[[1], [8]], [[2], [9]]], [[16, 129], [32, 145]])


def test_a_model_without_attention_has_no_tables():
    batch = PersistentBatch(4, 64, 16, VOCAB_SIZE, num_groups=0)
    step = prepare(batch, plan(0, [new_request("a", [*range(20)], [])], scheduled={"a": 20}))
    assert kv_places(step) == ([], [])


def text_request(request_id, block, token_types=None):
    request = new_request(request_id, [*range(8)], [block])
    return msgspec.structs.replace(request, pooling=PoolingParams(token_types=token_types))


@pytest.mark.parametrize(
    ("outputs_of", "index"),
    [("last", ([7], [5])), ("cls", ([0], [1])), ("all", ([*range(17)], [*range(6)]))],
)
def test_texts_to_embed_have_token_types_and_outputs_of_chosen_tokens(outputs_of, index):
    batch = PersistentBatch(4, 64, 16, VOCAB_SIZE, outputs_of=outputs_of, has_token_types=True)
    kinds = [1] * 8, None, [0] * 3 + [1] * 5
    texts = [text_request(name, 1, types) for name, types in zip("abc", kinds, strict=True)]
    step = prepare(batch, plan(0, texts, scheduled={"a": 8, "b": 6, "c": 3}))
    assert step.inputs.token_types.tolist() == [1] * 8 + [0] * 9
    assert step.inputs.logits_index.tolist() == index[0]
    batch.advance(step)
    running = [("b", (), 6), ("c", (), 3)]  # c moved into the gap
    step = prepare(batch, plan(1, [], running, scheduled={"b": 1, "c": 5}, finished=("a",)))
    assert step.inputs.token_types.tolist() == [0] + [1] * 5
    assert step.inputs.logits_index.tolist() == index[1]


def test_rows_stay_dense_and_keep_their_content_when_others_leave():
    batch = make_batch()
    requests = [
        new_request("a", [1, 2, 3], [1]),
        new_request("b", [4, 5], [2], temperature=1.0, seed=5),
        new_request("c", [6], [3], temperature=0.5, logprobs=2, logit_bias={3: 1.0}),
    ]
    step = prepare(batch, plan(0, requests, scheduled={"a": 3, "b": 2, "c": 1}))
    commit(batch, step, [10, 11, 12])
    step = prepare(batch, plan(1, running=[("c", (4,), 1)], scheduled={"c": 1}, finished=("a",)))
    assert batch.row_of == {"c": 0, "b": 1}
    assert step.inputs.ids.tolist() == [12]
    assert sampling(batch, step).temperature.tolist() == [0.5]
    assert sampling(batch, step).num_logprobs == (2,)
    assert sampling(batch, step).bias[1].tolist() == [3]
    commit(batch, step, [13])
    step = prepare(
        batch, plan(2, running=[("b", (), 2)], scheduled={"b": 1}, preempted=("c", "unknown"))
    )
    assert len(batch) == 1
    assert step.inputs.ids.tolist() == [11]
    assert sampling(batch, step).temperature.tolist() == [1.0]


def test_a_finished_id_may_be_new_in_the_same_plan():
    batch = make_batch(max_num_seqs=1)
    commit(batch, prepare(batch, plan(0, [new_request("a", [1], [1])], scheduled={"a": 1})), [5])
    again = new_request("a", [3, 4], [2])
    step = prepare(batch, plan(1, [again], scheduled={"a": 2}, finished=("a",)))
    assert step.inputs.ids.tolist() == [3, 4]
    assert step.inputs.attention.seq_lens.tolist() == [2]


def test_plans_that_do_not_fit_the_rows_are_refused():
    batch = make_batch(max_num_seqs=1)
    commit(batch, prepare(batch, plan(0, [new_request("a", [1], [1])], scheduled={"a": 1})), [5])
    with pytest.raises(EngineError, match="at token 4; its row is at 1"):
        prepare(batch, plan(1, running=[("a", (), 4)], scheduled={"a": 1}))
    with pytest.raises(EngineError, match="its row is at None"):
        prepare(batch, plan(1, running=[("x", (), 4)], scheduled={"x": 1}))
    with pytest.raises(EngineError, match="all 1 rows are taken"):
        prepare(batch, plan(1, [new_request("b", [1], [2])], scheduled={"b": 1}))


def test_plain_greedy_rows_ask_nothing_of_the_sampler():
    batch = make_batch()
    step = prepare(batch, plan(0, [new_request("a", [1], [1])], scheduled={"a": 1}))
    assert sampling(batch, step) is GREEDY


def test_prompt_rows_cover_all_but_the_first_prompt_token_over_chunks():
    batch = make_batch()
    request = new_request("a", [*range(50, 60)], [1], prompt_logprobs=3)
    seen, computed = [], 0
    for number, count in enumerate((4, 5, 1)):
        new = [request] if number == 0 else []
        running = [] if number == 0 else [("a", (), computed)]
        step = prepare(batch, plan(number, new, running, scheduled={"a": count}))
        computed += count
        assert len(step.sampled_ids) == (number == 2)
        for rows in step.prompt_rows:
            index = step.inputs.logits_index[rows.start : rows.stop]
            targets = rows.token_ids.tolist()
            assert (step.inputs.ids[index] + 1).tolist() == targets
            seen += targets
            assert rows.num_logprobs == 3
        commit(batch, step, [7] * len(step.sampled_ids))
    assert seen == [*range(51, 60)]
    step = prepare(batch, plan(3, running=[("a", (), 10)], scheduled={"a": 1}))
    assert step.prompt_rows == ()


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_up_to_the_full_length_are_scored_beside_others(new_core, is_async):
    """Nothing is generated behind them, in chunks or not."""
    runner = TensorFakeRunner(4, 96, 16, VOCAB_SIZE)
    core = new_core(
        14, 16, 96, runner=runner, max_num_seqs=4, max_num_batched_tokens=40,
        async_scheduling=is_async,
    )  # fmt: skip
    scored = {
        f"scored{length}": make_request(
            f"scored{length}", [i % VOCAB_SIZE for i in range(length)],
            temperature=0, max_tokens=0, prompt_logprobs=2,
        )
        for length in (1, 15, 16, 95, 96)
    }  # fmt: skip
    others = [
        make_request(f"r{i}", [*range(i, i + 9)], temperature=0, max_tokens=60) for i in (1, 2)
    ]
    for request in (*others, *scored.values()):
        core.add_request(request)
    done = run_to_end(core)
    core.close()
    assert core.stats().num_generated_tokens == 120
    for name, request in scored.items():
        [output] = done[name].outputs
        assert (output.new_token_ids, output.finish_reason) == ([], "length")
        tokens = [record.token_id for record in output.prompt_logprobs[1:]]
        assert tokens == request.prompt_token_ids[1:]
    for request in others:
        assert done[request.request_id].tokens == fake_generate(request, VOCAB_SIZE, 96)
    with pytest.raises(RequestError, match="at most 96 in the prompt"):
        core.add_request(make_request("long", 97, max_tokens=0, prompt_logprobs=0))
    with pytest.raises(RequestError, match="at most 95 in the prompt"):
        core.add_request(make_request("full", 96, max_tokens=1))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, KVCacheGroup(window=20))])
def test_whole_runs_equal_each_request_alone(new_core, policy, budget, groups):
    """Preemption, chunks, prefix hits, bans and prompt scores on the real batch and sampler."""
    rng = random.Random(f"{policy} {budget}")
    runner = TensorFakeRunner(5, 96, 16, VOCAB_SIZE, groups)
    core = new_core(
        num_blocks=1 + 7 * len(groups),
        groups=groups,
        max_model_len=96,
        runner=runner,
        policy=policy,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
    )
    requests = []
    for number in range(24):
        prompt = [*range(rng.choice([0, 16, 33, 50])), number, rng.randrange(VOCAB_SIZE)]
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                priority=rng.randrange(3),
                eos_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 5)),
                temperature=0,
                max_tokens=rng.randrange(5, 40),
                min_tokens=rng.randrange(5),
                logprobs=rng.choice([None, 0, 3, -1]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
            )
        )
        core.add_request(requests[-1])
    done = run_to_end(core)
    assert core.stats().num_preemptions > 0
    assert core.stats().kv_cache.prefix_hits > 0
    for request in requests:
        entry = done[request.request_id]
        assert entry.tokens == fake_generate(request, VOCAB_SIZE, 96)
        check_logprobs(request, entry)


def check_logprobs(request, entry):
    sampling = request.sampling
    records = [record for output in entry.outputs for record in output.logprobs or []]
    if sampling.logprobs is None:
        assert records == []
    else:
        assert [record.token_id for record in records] == entry.tokens
        number = VOCAB_SIZE if sampling.logprobs < 0 else sampling.logprobs
        assert {len(record.top_token_ids) for record in records} == {number}
    prompt = entry.outputs[0].prompt_logprobs
    if sampling.prompt_logprobs is None:
        assert prompt is None
    else:
        assert prompt[0] is None
        assert [record.token_id for record in prompt[1:]] == request.prompt_token_ids[1:]
