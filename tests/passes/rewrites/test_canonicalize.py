"""canonicalize: what goes, what stays, and that values never change."""

import pytest
import torch
from support_graphs import capture, values
from support_models import tiny_traced
from torch import nn

from girih.passes.rewrites.canonicalize import canonicalize

X = {"x": ("T", 8)}
aten = torch.ops.aten


def text_after(function, weights=None, inputs=X):
    captured = capture(function, weights or {}, inputs)
    captured.apply(canonicalize)
    return captured.text


def test_before_and_expected():
    def before(x):
        y = x.to(torch.float32).contiguous()
        wide = torch.cat([y.view(-1, 8), y.expand(-1, 8)], -1)
        torch.sin(x)  # dead
        return torch.cos(x.to(torch.float64)) + torch.cos(y.to(torch.float64)) + wide.sum()

    def expected(x):
        wide = torch.cat([x, x], -1)
        cos = torch.cos(x.to(torch.float64))
        return torch.add(cos, cos) + wide.sum()

    captured = capture(before, {}, X)
    reference = capture(expected, {}, X)
    assert captured.apply(canonicalize) > 0
    reference.apply(canonicalize)  # its cast brings an assert of its own
    assert "assert" not in captured.text
    # The two graphs list the same calls, in another order where nothing depends on it.
    assert sorted(calls(captured)) == sorted(calls(reference))
    [x] = values(X)
    torch.testing.assert_close(captured.call({}, x), before(x), rtol=0, atol=0)


def calls(captured):
    return [str(n.target) for n in captured.graph.nodes if n.op == "call_function"]


def work(captured):
    """Calls on tensors that give tensors."""
    return [
        t for t in calls(captured) if t.startswith("aten") and "assert" not in t and "sym" not in t
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x[1:],
        lambda x: x.transpose(0, 1),
        lambda x: x.unsqueeze(0).expand(3, -1, -1),
        lambda x: torch.sin(x) + torch.cos(x),
        lambda x: x.t().contiguous(),
        lambda x: nn.functional.layer_norm(x, (8,)),
    ],
    ids=["cast", "slice", "transpose", "expand", "different", "copy", "norm"],
)
def test_work_is_kept(function):
    captured = capture(function, {}, X)
    wanted = work(captured)
    captured.apply(canonicalize)
    assert work(captured) == wanted


def test_an_untouched_graph_reports_zero():
    captured = capture(lambda x: torch.sin(x) * 2, {}, X)
    captured.apply(canonicalize)
    text = captured.text
    assert captured.apply(canonicalize) == 0
    assert captured.text == text


def test_random_numbers_are_not_merged():
    text = text_after(lambda x: torch.rand_like(x) + torch.rand_like(x))
    assert text.count("aten.rand_like") == 2


def test_arguments_of_different_type_are_not_merged():
    text = text_after(lambda x: (x + 1) * (x + 1.0))
    assert text.count("aten.add.Tensor") == 2


def test_tracing_device_becomes_the_targets():
    captured = capture(lambda x: x + torch.arange(8, device=x.device), {}, X)
    assert "'meta'" in captured.text
    captured.apply(canonicalize)
    assert "'meta'" not in captured.text
    [x] = values(X)
    torch.testing.assert_close(captured.call({}, x), x + torch.arange(8))


def test_cast_to_the_type_of_another_names_the_type():
    text = text_after(lambda x: x.to(torch.bfloat16).type_as(x) + x.type_as(x))
    assert "type_as" not in text
    assert text.count("aten.to.dtype") == 2


def test_dropout_of_evaluation_goes():
    text = text_after(lambda x: nn.functional.dropout(x, 0.5, training=False) * 2)
    assert "dropout" not in text


def test_dropout_of_training_stays():
    text = text_after(lambda x: nn.functional.dropout(x, 0.5, training=True) * 2)
    assert "dropout" in text


def attention_of(x):
    q = x.view(-1, 2, 4).transpose(0, 1).contiguous().transpose(0, 1)
    return torch.ops.girih.attention(q, q, x.view(-1, 2, 4), 1.0, True, 0, 0.0, None)


def test_attention_gets_contiguous_operands():
    captured = capture(attention_of, {}, X)
    captured.apply(canonicalize)
    [call] = captured.graph.find_nodes(op="call_function", target=torch.ops.girih.attention.default)
    for operand in call.args[:3]:
        assert operand.meta["val"].is_contiguous()
    text = captured.text
    assert captured.apply(canonicalize) == 0, text
    [x] = values(X)
    torch.testing.assert_close(captured.call({}, x), attention_of(x))


NOISE = ("assert", "sym_size", "eq>", "aten.to.", "aten.type_as", "aten.contiguous", "aten.reshape")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_real_models_keep_their_work(kind, lowered_by):
    traced = tiny_traced(kind)
    lowered, counts = lowered_by(traced, "canonicalize")
    assert counts["canonicalize"] > 0
    before, after = operators(without_dead_code(traced.graph)), operators(lowered.graph)
    assert {t for t in before - after if not any(noise in t for noise in NOISE)} == set()
    layers = traced.spec.config["num_hidden_layers"]
    assert len(lowered.graph.find_nodes(op="call_function", target=aten.linear.default)) == (
        7 * layers + 1
    )
    assert "assert" not in lowered.as_text()


def without_dead_code(graph):
    """A copy without what nothing reads (the model's own look for packed sequences)."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.eliminate_dead_code()
    return copy


def operators(graph):
    return {str(n.target) for n in graph.nodes if n.op == "call_function"}
