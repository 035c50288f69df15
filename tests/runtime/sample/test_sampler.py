"""The sampler against a naive one per row; distributions, seeds, log-probabilities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from girih.runtime.records.plans import NewRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.sample import filters as sampling_filters
from girih.runtime.sample import sampler
from girih.runtime.sample.rows import SamplingRows
from girih.runtime.sample.sampler import GREEDY, argmax, sample, score_tokens, uniform_noise

SIZES = [5, 128, 300]


def random_logits(rows, size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * 3).to(dtype)


def ask(params, vocab_size, histories=None, stop_ids=()):
    """`SamplingInputs` of rows with these params; histories are (prompt, output) pairs."""
    histories = histories or [([1], [])] * len(params)
    rows = SamplingRows(len(params), vocab_size)
    token_ids = np.zeros((len(params), 64), np.int32)
    lengths = np.zeros((2, len(params)), np.int32)
    for row, (one, (prompt, output)) in enumerate(zip(params, histories, strict=True)):
        tokens = [*prompt, *output]
        rows.set(row, NewRequest(f"r{row}", tokens, len(prompt), one, tuple(stop_ids), [], 0))
        token_ids[row, : len(tokens)] = tokens
        lengths[:, row] = len(tokens), len(prompt)
    return rows.gather(np.arange(len(params)), token_ids, lengths[0], lengths[1])


# ---- the naive sampler: one row, plain Python ----


def naive_logits(logits, params, prompt, output, stop_ids=()):
    values = [float(v) for v in logits]
    if params.allowed_token_ids is not None:
        values = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(values)]
    for word in params.bad_words:
        if len(word) == 1 or output[-(len(word) - 1) :] == list(word[:-1]):
            values[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            values[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in set(prompt) | set(output):
        repetition = params.repetition_penalty
        values[token] = (
            values[token] / repetition if values[token] > 0 else values[token] * repetition
        )
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty
    return values


def naive_distribution(logits, params, prompt=(1,), output=(), stop_ids=()):
    """Probability of each token, as a list."""
    values = naive_logits(logits, params, list(prompt), list(output), stop_ids)
    if params.temperature == 0:
        best = values.index(max(values))
        return [float(i == best) for i in range(len(values))]
    largest = max(values)
    weights = [math.exp((v - largest) / params.temperature) for v in values]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k > 0:
        limit = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [w if w >= limit else 0.0 for w in weights]
    total, before, kept = sum(weights), 0.0, set()
    for weight in sorted(weights, reverse=True):
        if kept and before >= params.top_p * total:
            break
        kept.add(weight)
        before += weight
    weights = [w if w in kept else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def measured_distribution(logits, params, histories=None, stop_ids=(), grid=1024):
    """Probability of each token, by sweeping the random number of one row over a grid."""
    inputs = ask([params], logits.shape[0], histories, stop_ids)
    count = grid if params.temperature > 0 else 1
    wide = sampler.SamplingInputs(
        temperature=inputs.temperature.expand(count) if inputs.temperature is not None else None,
        uniform=(torch.arange(count, dtype=torch.float64) + 0.5) / count,
        **{
            name: value.expand(count)
            for name in ("min_p", "top_k", "top_p")
            if (value := getattr(inputs, name)) is not None
        },
    )
    work = sampler._change_logits(logits[None], inputs)
    tokens = sample(work.expand(count, -1).contiguous(), wide).token_ids
    return (tokens.bincount(minlength=logits.shape[0]) / count).tolist()


FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "tiny temperature": {"temperature": 1e-30},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k over the vocabulary": {"top_k": 10**9},
    "top_p": {"top_p": 0.8},
    "top_p nearly nothing": {"top_p": 1e-9},
    "top_p of a flat distribution": {"top_p": 0.9, "temperature": 50.0},
    "all filters": {"temperature": 1.5, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
def test_filters_give_the_naive_distribution(fields, size):
    logits = random_logits(1, size)[0]
    params = SamplingParams(**fields)
    expected = naive_distribution(logits, params)
    measured = measured_distribution(logits, params)
    # a sweep over a grid of n points is exact to one point per boundary
    assert max(abs(a - b) for a, b in zip(expected, measured, strict=True)) < 2 / 1024
    assert all(e > 0 for e, m in zip(expected, measured, strict=True) if m > 0)


EDITS = {
    "allowed": {"allowed_token_ids": (3, 17, 40)},
    "bad word": {"bad_words": ((2,),)},
    "bad sequence that is about to end": {"bad_words": ((5, 9, 2), (9, 4))},
    "bad sequence elsewhere": {"bad_words": ((9, 5, 2), (1, 5, 9, 6))},
    "min_tokens": {"min_tokens": 4},
    "min_tokens reached": {"min_tokens": 3},
    "bias": {"logit_bias": {2: 5.0, 40: -100.0}},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": -1.3},
    "everything": {
        "allowed_token_ids": tuple(range(30)),
        "bad_words": ((2,), (9, 4)),
        "logit_bias": {2: 50.0, 5: 2.0, 7: -3.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.4,
        "min_tokens": 10,
    },
}
HISTORY = ([1, 1, 8], [5, 5, 9])
STOP_IDS = (2, 6)


@pytest.mark.parametrize("fields", EDITS.values(), ids=EDITS)
def test_edits_give_the_naive_logits(fields):
    logits = random_logits(1, 50)
    params = SamplingParams(**fields)
    inputs = ask([params], 50, [HISTORY], STOP_IDS)
    work = sampler._change_logits(logits, inputs)
    expected = torch.tensor([naive_logits(logits[0], params, *HISTORY, STOP_IDS)])
    torch.testing.assert_close(work, expected)
    changes = not torch.equal(expected, logits)
    assert inputs.changes_logits == changes


def test_rows_with_different_settings_do_not_touch_each_other():
    all_fields = [*FILTERS.values(), *EDITS.values()]
    params = [SamplingParams(**fields, seed=number) for number, fields in enumerate(all_fields)]
    histories = [([1, row % 50], [row % 7, 9][: row % 3]) for row in range(len(params))]
    logits = random_logits(len(params), 300)
    before = logits.clone()
    together = sample(logits, ask(params, 300, histories, STOP_IDS)).token_ids.tolist()
    alone = [
        sample(logits[row : row + 1], ask([one], 300, [histories[row]], STOP_IDS)).token_ids.item()
        for row, one in enumerate(params)
    ]
    assert together == alone
    assert torch.equal(logits, before)
    for row, one in enumerate(params):
        probability = naive_distribution(logits[row], one, *histories[row], STOP_IDS)
        assert probability[together[row]] > 0


# ---- randomness ----


def chi_square(counts, probabilities):
    total = sum(counts)
    return sum(
        (c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True)
    )


def test_seeds_draw_from_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0, 1.5])
    draws = 6000
    params = [SamplingParams(seed=seed) for seed in range(draws)]
    tokens = sample(logits.expand(draws, -1).contiguous(), ask(params, 6)).token_ids
    # 5 degrees of freedom: 20.5 is the 0.999 quantile
    assert chi_square(tokens.bincount(minlength=6).tolist(), logits.softmax(0).tolist()) < 20.5


def test_positions_of_one_seed_draw_from_the_distribution():
    draws = 6000
    noise = uniform_noise(np.full(draws, 7, np.uint64), np.arange(draws, dtype=np.uint64))
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    assert chi_square(counts.tolist(), [0.05] * 20) < 43.8  # 0.999 quantile, 19 degrees
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.05
    assert len(np.unique(noise)) == draws
    assert noise.min() > 0 and noise.max() < 1


def test_a_seed_gives_the_same_token_in_any_batch_and_place():
    logits = random_logits(6, 1000, seed=3)
    fields = [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0}, {"min_p": 0.1}, {"top_p": 0.99}]
    params = [SamplingParams(**f, seed=11) for f in fields]
    history = ([1, 2, 3], [4])
    alone = [
        sample(logits[i : i + 1], ask([params[i]], 1000, [history])).token_ids.item()
        for i in range(6)
    ]
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        inputs = ask([params[i] for i in order], 1000, [history] * 6)
        tokens = sample(logits[list(order)], inputs).token_ids.tolist()
        assert tokens == [alone[i] for i in order]


def test_seeds_differ_and_missing_seeds_are_fresh():
    logits = torch.zeros(1, 1000)

    def draw(**fields):
        return sample(logits, ask([SamplingParams(**fields)], 1000)).token_ids.item()

    assert draw(seed=5) == draw(seed=5)
    assert len({draw(seed=seed) for seed in range(20)}) > 15
    assert draw(seed=-1) == draw(seed=2**64 - 1)  # the same 64 bits
    assert len({draw() for _ in range(20)}) > 15


def test_the_ends_of_the_random_range_stay_inside_the_kept_tokens():
    logits = torch.full((3, 300), -torch.inf)
    logits[:, [40, 200]] = 0.0
    noise = torch.tensor([2.0**-49, 0.5, 1 - 2.0**-49], dtype=torch.float64)
    inputs = sampler.SamplingInputs(temperature=torch.ones(3), uniform=noise)
    assert sample(logits, inputs).token_ids.tolist() == [40, 200, 200]


def test_tokens_with_equal_logits_at_a_limit_are_kept_together():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.75}):
        kept = measured_distribution(logits[0], SamplingParams(**fields))
        assert [p > 0 for p in kept] == [True, True, True, True, False]


def filter_weights(size=6000):
    """Rows of a flat, a steep and a coarse (many ties) distribution, largest weight 1."""
    steps = torch.arange(size, dtype=torch.float32)
    rows = torch.stack([steps * -1e-3, steps * -0.05, (steps // 500) * -0.5]).exp()
    return rows[:, torch.randperm(size, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 0.8, 0.95, 0.9999])
def test_top_p_limit_is_that_of_a_sort(share):
    weights = filter_weights()
    kept = weights.clone()
    sampling_filters.keep_top_p(kept, torch.full((3,), share), weights.double().sum(1))
    for row, before in zip(kept, weights, strict=True):
        ordered = before.double().sort(descending=True).values
        target = np.float64(np.float32(share)) * ordered.sum()
        num_needed = int((ordered.cumsum(0) - ordered < target).sum())
        limit = ordered[num_needed - 1]
        assert torch.equal(row > 0, before.double() >= limit)


@pytest.mark.parametrize("k", [1, 2, 46, 47, 500, 5999, 6000])
def test_top_k_limit_is_that_of_a_sort(k):
    weights = filter_weights()
    weights[1, weights[1] < 1e-20] = 0.0  # fewer than k may be left by a filter before
    kept = weights.clone()
    sampling_filters.keep_top_k(kept, torch.tensor([k, k, k]))
    for row, before in zip(kept, weights, strict=True):
        limit = before.sort(descending=True).values[k - 1]
        assert torch.equal(row, torch.where(before >= limit, before, 0.0))


def test_filters_leave_rows_without_a_limit_alone():
    weights = filter_weights(300)
    kept = weights.clone()
    sampling_filters.keep_top_k(kept, torch.tensor([300, 300, 5]))
    sampling_filters.keep_top_p(kept, torch.tensor([1.0, 0.5, 1.0]), kept.double().sum(1))
    assert torch.equal(kept[0], weights[0])
    assert 0 < kept[1].count_nonzero() < 300


# ---- greedy, shapes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 300, 1000, 4096])
def test_argmax_is_the_first_of_the_largest(size, dtype):
    for seed in range(5):
        logits = random_logits(4, size, seed, dtype).clamp(max=2.0)  # ties at the top
        expected = [row.tolist().index(max(row.tolist())) for row in logits]
        assert argmax(logits).tolist() == expected
    edge = torch.zeros(size, size, dtype=dtype).fill_diagonal_(1)
    assert argmax(edge).tolist() == list(range(size))


def test_greedy_batch_is_argmax_and_an_empty_batch_is_empty():
    logits = random_logits(3, 300)
    output = sample(logits, GREEDY)
    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.logprobs is None
    assert sample(torch.zeros(0, 300), GREEDY).token_ids.tolist() == []


def test_a_row_with_nothing_left_is_not_random_garbage():
    params = SamplingParams(allowed_token_ids=(2,), bad_words=((2,),), seed=1)
    token = sample(random_logits(1, 50), ask([params], 50)).token_ids.item()
    assert 0 <= token < 50


# ---- log-probabilities ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 5, -1, 999])
def test_scores_are_those_of_log_softmax(number, dtype):
    logits = random_logits(70, 60, dtype=dtype)
    tokens = torch.arange(70) % 60
    expected = logits.double().log_softmax(-1)
    records = score_tokens(logits, tokens, [number] * 70)
    listed = min(number, 60) if number >= 0 else 60
    for row, (record, token) in enumerate(zip(records, tokens.tolist(), strict=True)):
        assert record.token_id == token
        assert record.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert record.rank == 1 + sum(v > logits[row, token] for v in logits[row])
        best = logits[row].float().sort(descending=True).values[:listed]
        assert logits[row, record.top_token_ids].float().tolist() == best.tolist()
        for token_id, value in zip(record.top_token_ids, record.top_logprobs, strict=True):
            assert value == pytest.approx(expected[row, token_id].item(), abs=1e-5)
    if number == -1:
        assert sum(map(math.exp, records[0].top_logprobs)) == pytest.approx(1.0, abs=1e-4)


def test_logprobs_are_of_the_raw_distribution_and_only_for_rows_that_ask():
    logits = random_logits(3, 50)
    best = logits[1].argmax().item()
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=2, logit_bias={best: -100.0}),
        SamplingParams(temperature=0.2, logprobs=0, top_k=1),
    ]
    output = sample(logits, ask(params, 50))
    assert output.logprobs[0] is None
    record = output.logprobs[1]
    assert record.token_id != best
    assert record.rank == 2
    assert record.top_token_ids == [best, record.token_id]
    assert record.top_logprobs[1] == record.logprob
    assert output.logprobs[2].rank == 1
    assert output.logprobs[2].top_token_ids == []


EDGES: dict[str, list[Any]] = {
    "temperature": [0.0, -0.0, 5e-324, 1e-46, 1e-40, 1e-38, 2.0**-126, 1e-30, 1e38, 1e39, 1e308],
    "top_p": [5e-324, 1e-46, 1e-40, 1e-9, 1 - 2.0**-30, 1 - 2.0**-53],
    "min_p": [-0.0, 5e-324, 1e-46, 1e-40, 1 - 2.0**-30, 1.0],
    "top_k": [-1, 1, 299, 300, 2**31, 2**63 - 1],
    "repetition_penalty": [5e-324, 1e-46, 1e-38, 1e38, 1e308],
    "frequency_penalty": [-2, -0.0, 5e-324, 2],
    "presence_penalty": [-2, -0.0, 1e-46, 2],
    "logit_bias": [{1: 100.0}, {1: -100.0}, {1: 5e-324, 2: -0.0}, dict.fromkeys(range(300), -100)],
    "seed": [-(2**63), 2**64 - 1],
}
BESIDE_EDGES = {
    "alone": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "edits": {"bad_words": ((3,),), "logit_bias": {4: 9.0}, "logprobs": 3},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
    "allowed": {"allowed_token_ids": (3, 5, 7), "top_k": 2, "top_p": 0.5},
}


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-40, 0.0])
@pytest.mark.parametrize("beside", BESIDE_EDGES)
def test_extreme_settings_beside_greedy_rows(beside, scale):
    """Every extreme with every filter, in one batch and alone: greedy rows and tokens are right."""
    logits = random_logits(3, 300, seed=5) * scale
    greedy = logits.argmax(-1).tolist()
    history = ([1, 3, 3, greedy[1]], [3, greedy[1]])
    plain = SamplingParams(temperature=0)
    for field, values in EDGES.items():
        for value in values:
            asked = {"temperature": 0.8, "seed": 7, **BESIDE_EDGES[beside], field: value}
            params = [plain, SamplingParams(**asked), plain]
            together = sample(logits, ask(params, 300, [history] * 3)).token_ids.tolist()
            alone = sample(logits[1:2], ask(params[1:2], 300, [history])).token_ids.item()
            assert (together[0], together[2]) == (greedy[0], greedy[2]), (field, value)
            assert together[1] == alone, (field, value)
            banned = {word[0] for word in params[1].bad_words}
            allowed = set(params[1].allowed_token_ids or range(300)) - banned
            assert alone in allowed, (field, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38])
@pytest.mark.parametrize("beside", BESIDE_EDGES)
def test_a_row_without_usable_logits_harms_no_other(beside, value):
    logits = random_logits(4, 300, seed=6)
    logits[1] = value
    logits[2, :7] = value
    greedy = logits.argmax(-1).tolist()
    plain = SamplingParams(temperature=0)
    asked = SamplingParams(temperature=0.8, seed=7, **BESIDE_EDGES[beside])
    output = sample(logits, ask([plain, asked, asked, plain], 300, [([1, 3], [3])] * 4))
    assert output.token_ids[[0, 3]].tolist() == [greedy[0], greedy[3]]
    assert all(0 <= token < 300 for token in output.token_ids.tolist())


def test_logits_that_a_penalty_makes_infinite_are_the_largest():
    logits = torch.tensor([[9.0, 8.0, 10.0, -1.0]])
    params = SamplingParams(seed=7, repetition_penalty=5e-324)
    chosen = {
        sample(logits, ask([params], 4, [([0, 1] * length, [])])).token_ids.item()
        for length in range(1, 30)
    }
    assert chosen == {0, 1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40, 1e-38, -0.0])
def test_temperatures_below_the_smallest_useful_one_are_greedy(temperature):
    params = SamplingParams(temperature=temperature, seed=1)
    assert params.is_greedy
    logits = torch.zeros(1, 300)  # chance would not take the first
    beside = SamplingParams(temperature=1.0, seed=1)
    both = sample(logits.repeat(2, 1), ask([params, beside], 300)).token_ids.tolist()
    assert both[0] == 0 != both[1]


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 1e39}, {"repetition_penalty": 1e-320}, {"repetition_penalty": 1e39}],
)
def test_settings_beyond_float32_never_choose_what_is_banned(extreme):
    params = SamplingParams(**{"temperature": 1.0, "seed": 7, "bad_words": ((3,),), **extreme})
    logits = torch.zeros(1, 5)
    logits[0, 3] = 9.0
    chosen = set()
    for length in range(1, 30):
        inputs = ask([params], 5, [([3] * length, [])])
        chosen.add(sample(logits, inputs).token_ids.item())
    assert 3 not in chosen
    assert len(chosen) > 1  # and chance is not lost
