"""gather_last_rows: which rows the end of a model computes."""

import pytest
import torch
from support_graphs import capture, values
from support_models import tiny_traced
from torch.nn import functional as F

from girih.passes.rewrites.gather_last_rows import gather_last_rows

WEIGHTS = {"w": (16, 8), "norm": (8,)}
INPUTS = {"x": ("T", 8), "logits_index": ("S",)}


def attend(x):
    q = x.view(-1, 2, 4)
    return torch.ops.girih.attention(q, q, q, 0.5, True, 0, 0.0, None)


def before(w, norm, x, logits_index):
    h = attend(x).reshape(x.shape[0], 8) + x
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
    return F.silu(F.linear(h, w)).index_select(0, logits_index)


def expected(w, norm, x, logits_index):
    attended = attend(x)
    rows = logits_index.shape[0]
    attended = attended.index_select(0, logits_index)
    h = attended.reshape(rows, 8) + x.index_select(0, logits_index)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
    return F.silu(F.linear(h, w))


def twice(w, norm, x, logits_index):
    h = F.silu(F.linear(attend(x).reshape(x.shape[0], 8), w))
    return h.index_select(0, logits_index) + torch.sigmoid(h).index_select(0, logits_index)


def test_rows_that_are_read_elsewhere_too_stay_below():
    captured = capture(twice, WEIGHTS, INPUTS)
    text = captured.text
    assert captured.apply(gather_last_rows) == 0
    assert captured.text == text


def test_before_and_expected():
    captured = capture(before, WEIGHTS, INPUTS)
    assert captured.apply(gather_last_rows) == 2  # the attention's output and the residual
    captured.tidy()
    wanted = capture(expected, WEIGHTS, INPUTS)
    assert captured.text == wanted.text


def test_a_second_run_changes_nothing():
    captured = capture(before, WEIGHTS, INPUTS)
    captured.apply(gather_last_rows)
    text = captured.text
    assert captured.apply(gather_last_rows) == 0
    assert captured.text == text


def test_same_numbers():
    captured = capture(before, WEIGHTS, INPUTS)
    w, norm = values(WEIGHTS)
    x, index = values(INPUTS)
    wanted = before(w, norm, x, index)
    captured.apply(gather_last_rows)
    torch.testing.assert_close(captured.call({"w": w, "norm": norm}, x, index), wanted)


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.cumsum(0),
        lambda h: h.mean(0, keepdim=True) + h,
        lambda h: h.flip(0),
        lambda h: torch.softmax(h, 0),
        lambda h: h.view(2, h.shape[0], 4).reshape(h.shape[0], 8),
        lambda h: h.reshape(h.shape[0] * 2, 4).relu().reshape(-1, 8),
        lambda h: h[1:],
    ],
    ids=["cumsum", "mean", "flip", "softmax", "mixing-view", "splitting-view", "shift"],
)
def test_rows_that_mix_are_refused(between):
    def function(x, logits_index):
        h = between(attend(x).reshape(x.shape[0], 8))
        return h.relu().index_select(0, logits_index)

    captured = capture(function, {}, INPUTS)
    text = captured.text
    assert captured.apply(gather_last_rows) == 0
    assert captured.text == text
    assert any("may mix rows" in note for note in captured.context.notes)


def test_no_selection_no_rewrite():
    captured = capture(lambda x, logits_index: attend(x) + logits_index.sum(), {}, INPUTS)
    assert captured.apply(gather_last_rows) == 0


def test_another_index_is_left_alone():
    def function(x, logits_index):
        return attend(x).relu().index_select(0, logits_index - 1)

    captured = capture(function, {}, INPUTS)
    assert captured.apply(gather_last_rows) == 0


def test_a_branch_beside_attention_is_selected_at_its_end():
    def function(w, x, logits_index):
        h = attend(x).reshape(x.shape[0], 8).relu()
        beside = F.linear(x, w)  # defined after the first node behind attention
        return (h + beside).index_select(0, logits_index)

    captured = capture(function, {"w": (8, 8)}, INPUTS)
    assert captured.apply(gather_last_rows) == 2
    [w], (x, index) = values({"w": (8, 8)}), values(INPUTS)
    torch.testing.assert_close(captured.call({"w": w}, x, index), function(w, x, index))


def test_normalization_over_the_last_dimension_moves():
    def function(x, logits_index):
        h = F.layer_norm(attend(x).reshape(x.shape[0], 8), (8,))
        return h.index_select(0, logits_index)

    captured = capture(function, {}, INPUTS)
    assert captured.apply(gather_last_rows) == 1
    x, index = values(INPUTS)
    torch.testing.assert_close(captured.call({}, x, index), function(x, index))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_real_models_select_twice(kind, lowered_by):
    lowered, counts = lowered_by(tiny_traced(kind), "canonicalize", "gather_last_rows")
    assert counts["gather_last_rows"] == 2
    assert lowered.as_text().count("aten.index_select") == 2


def test_parallel_attention_and_mlp(lowered_by):
    _, counts = lowered_by(tiny_traced("cohere"), "canonicalize", "gather_last_rows")
    assert counts["gather_last_rows"] == 3  # attention, MLP beside it, residual
