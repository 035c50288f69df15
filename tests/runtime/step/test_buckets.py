"""Which bucket a step runs in: the table, its limits, and any step at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from girih.graph.execute.batch_descriptor import BatchDescriptor
from girih.kernels.base.errors import ConfigError, EngineError
from girih.runtime.records.config import RuntimeConfig
from girih.runtime.step.buckets import Dispatcher, Mode, ReplayCounts, chosen_sizes, derived_sizes

TOKENS, REQUESTS = (4, 16, 64), (1, 2, 8)


def test_dispatching_needs_no_torch():
    code = "import girih.runtime.step.buckets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("best", "size", "taken", "reasons"),
    [
        ("full", (1, 1, 1), ("full", "1"), []),
        ("full", (3, 3, 3), ("full", "8"), []),
        ("full", (3, 3, 0), ("full", "8"), []),
        ("full", (8, 8, 8), ("full", "8"), []),
        ("full", (9, 9, 9), ("piecewise", "16"), ["requests"]),
        ("full", (4, 3, 3), ("piecewise", "4"), ["mixed"]),
        ("full", (3, 3, 4), ("piecewise", "4"), ["logits"]),
        ("full", (64, 1, 64), ("piecewise", "64"), ["mixed"]),
        ("full", (65, 1, 1), ("none", ""), ["mixed", "tokens"]),
        ("full", (65, 65, 65), ("none", ""), ["requests", "tokens"]),
        ("piecewise", (3, 3, 3), ("piecewise", "4"), []),
        ("piecewise", (17, 2, 2), ("piecewise", "64"), []),
        ("piecewise", (65, 2, 2), ("none", ""), ["tokens"]),
        ("none", (1, 1, 1), ("none", ""), []),
    ],
)
def test_the_table(best, size, taken, reasons):
    found = Dispatcher(Mode(best), TOKENS, REQUESTS).choose(*size)
    assert (found.mode.value, found.bucket) == taken
    assert [miss.reason for miss in found.misses] == reasons


def test_a_mode_that_a_program_cannot_have_is_passed_over():
    dispatcher = Dispatcher(Mode.FULL, TOKENS, REQUESTS, {Mode.FULL: "it has states"})
    found = dispatcher.choose(2, 2, 2)
    assert found.as_text(2) == "piecewise 4 (2 tokens); not full: it has states"
    neither = Dispatcher(
        Mode.FULL, TOKENS, REQUESTS, {Mode.FULL: "it has states", Mode.PIECEWISE: "no head"}
    ).choose(2, 2, 2)
    assert neither.as_text(2) == "none; not full: it has states; not piecewise: no head"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ((3, 3, 3), "full 8 (3 tokens)"),
        ((5, 3, 3), "piecewise 16 (5 tokens); not full: 3 requests have 5 tokens, not one each"),
        ((9, 9, 9), "piecewise 16 (9 tokens); not full: 9 requests, the largest bucket holds 8"),
        ((2, 2, 3), "piecewise 4 (2 tokens); not full: 3 rows of logits are wanted of 2 requests"),
    ],
)
def test_a_decision_explains_itself(size, text):
    assert Dispatcher(Mode.FULL, TOKENS, REQUESTS).choose(*size).as_text(size[0]) == text


sizes = st.lists(st.integers(1, 200), min_size=0, max_size=12, unique=True).map(sorted)


@given(st.sampled_from(Mode), sizes, sizes, st.data())
def test_any_step_runs_in_the_smallest_bucket_of_the_best_mode_that_takes_it(
    best, token_sizes, request_sizes, data
):
    requests = data.draw(st.integers(1, 210))
    tokens = data.draw(st.just(requests) | st.integers(requests, 230))
    rows = data.draw(st.integers(0, tokens))
    found = Dispatcher(best, token_sizes, request_sizes).choose(tokens, requests, rows)
    whole = [n for n in request_sizes if n >= requests and tokens == requests and rows <= requests]
    pieces = [n for n in token_sizes if n >= tokens]
    if best is Mode.FULL and whole:
        expected, shape = Mode.FULL, BatchDescriptor(whole[0], whole[0], is_uniform=True)
    elif best is not Mode.NONE and pieces:
        expected, shape = Mode.PIECEWISE, BatchDescriptor(pieces[0])
    else:
        expected, shape = Mode.NONE, None
    assert (found.mode, found.descriptor) == (expected, shape)
    order = [Mode.FULL, Mode.PIECEWISE, Mode.NONE]
    missed = order[order.index(best) : order.index(expected)]
    assert [miss.mode for miss in found.misses] == missed
    assert all(miss.text for miss in found.misses)


@given(st.integers(1, 70_000))
def test_derived_buckets_hold_every_step_with_little_padding(limit):
    found = derived_sizes(limit)
    assert found[-1] == limit
    assert list(found) == sorted(set(found))
    for before, size in zip((0, *found), found, strict=False):
        worst = size - before - 1  # rows of padding of the smallest step in the bucket
        assert worst <= max(7, size / 8)


def test_derived_buckets():
    assert derived_sizes(1) == (1,)
    assert derived_sizes(4) == (1, 2, 4)
    assert derived_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert derived_sizes(256)[-9:] == (128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert len(derived_sizes(8192)) == 67


def test_chosen_buckets():
    assert chosen_sizes("x", (), 4) == (1, 2, 4)
    assert chosen_sizes("x", [3, 9], 9) == (3, 9)
    with pytest.raises(ConfigError, match="x ends at 9; the scheduler's limits allow steps of 8"):
        chosen_sizes("x", (3, 9), 8)


@pytest.mark.parametrize("value", [(0, 1), (4, 4), (8, 2), (-1,)])
def test_buckets_that_do_not_grow_are_refused(value):
    with pytest.raises(ConfigError, match=r"replay_tokens is .* positive numbers that grow"):
        RuntimeConfig(replay_tokens=value)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="replay is 'whole'; it must be one of auto, none"):
        RuntimeConfig(replay="whole")


@pytest.mark.parametrize("wrong", [(0, None, False), (4, 3, True), (4, None, True)])
def test_shapes_that_no_step_has_are_refused(wrong):
    with pytest.raises(EngineError, match="describes no step"):
        BatchDescriptor(*wrong)


def test_counts():
    dispatcher, counts = Dispatcher(Mode.FULL, TOKENS, REQUESTS), ReplayCounts()
    for size, is_new in (
        ((3, 3, 3), True),
        ((8, 8, 8), False),
        ((5, 2, 2), True),
        ((99, 1, 1), False),
    ):
        counts.note(dispatcher.choose(*size), size[0], is_new)
    stats = counts.stats(12)
    assert stats.steps == {"full": {"8": 2}, "piecewise": {"16": 1}, "none": {"": 1}}
    assert stats.tokens == {"full": 11, "piecewise": 5, "none": 99}
    assert stats.padded_tokens == {"full": 5, "piecewise": 11, "none": 0}
    assert stats.captures == {"full": 1, "piecewise": 1, "none": 0}
    assert stats.misses == {"full": {"mixed": 2}, "piecewise": {"tokens": 1}}
    assert (stats.num_steps, stats.num_captured, stats.num_captured_tokens) == (4, 3, 16)
    assert stats.buffer_bytes == 12
