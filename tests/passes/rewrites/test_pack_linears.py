"""pack_linears: linears and embeddings on packed weights."""

import pytest
import torch
from support_graphs import capture, values
from support_models import tiny_traced
from torch.nn import functional as F

from girih.graph.ir.weight_plan import PACKED, PLAIN
from girih.passes.rewrites.pack_linears import pack_linears

X = {"x": ("T", 8)}
W = {"w": (20, 8)}


def test_before_and_expected():
    captured = capture(lambda w, x: F.linear(x, w).relu(), W, X)
    wanted = capture(
        lambda packed, x: torch.ops.girih.packed_linear(x, packed, None, 20).relu(),
        {"w": (2, 8, 16)},
        X,
    )
    assert captured.apply(pack_linears) == 1
    assert captured.text == wanted.text
    entry = captured.context.weights.entries["w"]
    assert (entry.form, entry.shape) == (PACKED, (20, 8))


def test_leading_dimensions_of_one_are_taken_off_and_put_back():
    captured = capture(lambda w, b, x: F.linear(x[None, None], w, b), {**W, "b": (20,)}, X)
    assert captured.apply(pack_linears) == 1
    assert "f32[1, 1, T, 20]" in captured.text
    (w, b), [x] = values({**W, "b": (20,)}), values(X)
    torch.testing.assert_close(captured.call({"w": w, "b": b}, x), F.linear(x, w, b)[None, None])


def test_a_second_run_changes_nothing():
    captured = capture(lambda w, x: F.linear(x, w), W, X)
    captured.apply(pack_linears)
    text = captured.text
    assert captured.apply(pack_linears) == 0
    assert captured.text == text


TIED = {"w": (30, 10)}
IDS = {"ids": ("T",)}


def tied(w, ids):
    return F.linear(F.embedding(ids, w).relu(), w)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 10), (torch.bfloat16, 10), (torch.bfloat16, 9)]
)
def test_tied_embedding_reads_the_packed_weight(dtype, width):
    shapes = {"w": (30, width)}
    captured = capture(tied, shapes, IDS, dtype)
    assert captured.apply(pack_linears) == 2
    assert "aten.embedding" not in captured.text
    [w], [ids] = values(shapes, dtype), values(IDS)
    torch.testing.assert_close(captured.call({"w": w}, ids), tied(w, ids), rtol=2e-2, atol=2e-2)


def test_gathered_rows_are_exact():
    captured = capture(
        lambda w, ids: F.embedding(ids, w) + 0 * F.linear(F.embedding(ids, w), w).sum(), TIED, IDS
    )
    captured.apply(pack_linears)
    [w], _ = values(TIED), None
    ids = torch.arange(30)
    torch.testing.assert_close(captured.call({"w": w}, ids), w, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "weights", "inputs"),
    [
        (lambda w, x: F.linear(x, w) + w.sum(), W, X),
        (lambda w, x: F.linear(x, w * 2), W, X),
        (lambda w, x: x @ w.t(), W, X),
        (lambda w, ids: F.embedding(ids, w), TIED, IDS),
        (lambda w, x: F.linear(x.view(-1, 2, 8), w), W, {"x": ("T", 2, 8)}),
        (lambda w, x: F.linear(w, x), W, {"x": ("T", 8)}),
    ],
    ids=["extra user", "computed", "matmul", "embedding only", "two rows per token", "as input"],
)
def test_must_not_fire(function, weights, inputs):
    captured = capture(function, weights, inputs)
    text = captured.text
    assert captured.apply(pack_linears) == 0
    assert captured.text == text
    assert all(e.form == PLAIN for e in captured.context.weights.entries.values())


def test_a_declined_candidate_says_why():
    captured = capture(lambda w, x: F.linear(x, w) + w.sum(), W, X)
    captured.apply(pack_linears)
    assert captured.context.notes == ["linear: w has other users than linears"]


@pytest.mark.parametrize(("kind", "extra"), [("llama", 2), ("qwen3", 1), ("gemma3_text", 2)])
def test_real_models_pack_every_linear(kind, extra, lowered_by):
    traced = tiny_traced(kind)
    layers = traced.spec.config["num_hidden_layers"]
    lowered, counts = lowered_by(traced, "canonicalize", "merge_sibling_linears", "pack_linears")
    assert counts["pack_linears"] == 4 * layers + extra  # head, and embedding when it is tied
    assert "aten.linear" not in lowered.as_text()
