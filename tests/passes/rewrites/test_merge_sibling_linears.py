"""merge_sibling_linears: one product per shared input, as a change of the plan."""

import dataclasses

import pytest
import torch
from support_graphs import capture, values
from support_models import tiny_traced
from torch.nn import functional as F

from girih.graph.ir.weight_plan import PACKED
from girih.passes.rewrites.merge_sibling_linears import merge_sibling_linears

X = {"x": ("T", 8)}
QKV = {"l.q.weight": (16, 8), "l.k.weight": (4, 8), "l.v.weight": (4, 8)}


TWO = {"a.weight": (4, 8), "b.weight": (4, 8)}


def before(q, k, v, x):
    return F.linear(x, q).sum(-1) + F.linear(x, k).sum(-1) * F.linear(x, v).sum(-1)


def expected(qkv, x):
    y = F.linear(x, qkv)
    q = torch.ops.aten.slice.Tensor(y, -1, 0, 16)
    k = torch.ops.aten.slice.Tensor(y, -1, 16, 20)
    v = torch.ops.aten.slice.Tensor(y, -1, 20, 24)
    return q.sum(-1) + k.sum(-1) * v.sum(-1)


def test_before_and_expected():
    captured = capture(before, QKV, X)
    wanted = capture(expected, {"l.{q,k,v}.weight": (24, 8)}, X)
    assert captured.apply(merge_sibling_linears) == 1
    assert captured.text == wanted.text
    entry = captured.context.weights.entries["l.{q,k,v}.weight"]
    assert entry.sources == tuple(QKV)
    assert entry.shape == (24, 8)
    assert set(captured.context.weights.entries) == {"l.{q,k,v}.weight"}


def test_biases_merge_with_their_weights():
    shapes = {"q.weight": (6, 8), "q.bias": (6,), "k.weight": (2, 8), "k.bias": (2,)}

    def function(qw, qb, kw, kb, x):
        return torch.cat([F.linear(x, kw, kb), F.linear(x, qw, qb)], -1)

    captured = capture(function, shapes, X)
    assert captured.apply(merge_sibling_linears) == 1
    entries = captured.context.weights.entries
    assert {n: e.shape for n, e in entries.items()} == {
        "{k,q}.weight": (8, 8),
        "{k,q}.bias": (8,),
    }
    weights, [x] = values(shapes), values(X)
    got = captured.call(dict(zip(shapes, weights, strict=True)), x)
    torch.testing.assert_close(got, function(*weights, x))


def test_same_numbers():
    captured = capture(before, QKV, X)
    captured.apply(merge_sibling_linears)
    weights, [x] = values(QKV), values(X)
    got = captured.call(dict(zip(QKV, weights, strict=True)), x)
    torch.testing.assert_close(got, before(*weights, x))


def test_strides_of_what_follows_are_those_of_views():
    captured = capture(
        lambda a, b, x: F.linear(x, a).view(-1, 2, 2) + F.linear(x, b).view(-1, 2, 2), TWO, X
    )
    captured.apply(merge_sibling_linears)
    assert captured.text.count("f32[T, 2, 2] strides[8, 2, 1] = aten.view") == 2


def test_a_second_run_changes_nothing():
    captured = capture(before, QKV, X)
    captured.apply(merge_sibling_linears)
    text = captured.text
    assert captured.apply(merge_sibling_linears) == 0
    assert captured.text == text


@pytest.mark.parametrize(
    ("function", "weights"),
    [
        (lambda a, b, x: F.linear(x, a) + F.linear(x + 1, b), TWO),
        (lambda a, b, x: F.linear(x, a) + F.linear(x, b) + a.sum(), {**TWO, "b.weight": (4, 8)}),
        (lambda a, b, x: F.linear(x, a) + F.linear(x, b * 2), TWO),
        (lambda a, b, c, x: F.linear(x, a, c) + F.linear(x, b), {**TWO, "a.bias": (4,)}),
        (lambda a, b, x: F.linear(x, a) + F.linear(x, a) * b.sum(), TWO),
        (lambda a, b, x: F.linear(x, a) + b.sum(), TWO),
    ],
    ids=["other input", "extra user", "computed weight", "one bias", "same weight", "single"],
)
def test_must_not_fire(function, weights):
    captured = capture(function, weights, X)
    text, plan = captured.text, dict(captured.context.weights.entries)
    assert captured.apply(merge_sibling_linears) == 0
    assert captured.text == text
    assert captured.context.weights.entries == plan


def test_a_declined_candidate_says_why():
    captured = capture(lambda a, b, x: F.linear(x, a) + F.linear(x, b) + a.sum(), TWO, X)
    captured.apply(merge_sibling_linears)
    [note] = captured.context.notes
    assert "a.weight has other users" in note


def test_packed_weights_are_left_alone():
    captured = capture(before, QKV, X)
    plan = captured.context.weights
    for entry in list(plan.entries.values()):
        plan.add(dataclasses.replace(entry, form=PACKED))
    assert captured.apply(merge_sibling_linears) == 0


def test_names_that_differ_in_length_are_listed():
    captured = capture(
        lambda a, b, x: F.linear(x, a) + F.linear(x, b),
        {"q.weight": (4, 8), "m.k.weight": (4, 8)},
        X,
    )
    captured.apply(merge_sibling_linears)
    assert list(captured.context.weights.entries) == ["{q.weight,m.k.weight}"]


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 4)])
def test_real_models_merge_twice_per_layer(kind, layers, lowered_by):
    lowered, counts = lowered_by(tiny_traced(kind), "canonicalize", "merge_sibling_linears")
    assert counts["merge_sibling_linears"] == 2 * layers  # q/k/v, gate/up
    merged = [e for e in lowered.weights.entries.values() if len(e.sources) > 1]
    assert sorted(len(e.sources) for e in merged) == sorted([3, 2] * layers)
