"""Graphs that would mix the sequences of a step are refused."""

import pytest
import torch
from support_graphs import capture

from girih.graph.trace.fail_closed import check_captured
from girih.kernels.base.errors import TraceError


def graph_of(function):
    inputs = {"x": ("T", 8), "logits_index": ("S",)}

    def step(w, x, logits_index):
        q = function(x, w).view(-1, 2, 4)
        out = torch.ops.girih.attention(q, q, q, 0.5, True, 0, 0.0, None)
        return out.reshape(-1, 8).index_select(0, logits_index)

    return capture(step, {"w": (8, 8)}, inputs).graph


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: x - x.mean(0), "combines all tokens"),
        (lambda x, w: x.cumsum(0), "combines tokens along a step"),
        (lambda x, w: torch.softmax(x, 0), "combines tokens along a step"),
        (lambda x, w: x * x.sum(), "combines all tokens"),
        (lambda x, w: torch.roll(x, 1), "combines tokens along a step"),
        (lambda x, w: torch.roll(x, [1], []), "combines tokens along a step"),
        (
            lambda x, w: x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:-1],
            "shifts tokens|takes some",
        ),
        (lambda x, w: (x @ x.t()) @ x, "tokens x tokens tensor"),
        (lambda x, w: torch.relu(x[:, None] - x[None]).amax(1), "tokens x tokens tensor"),
        (lambda x, w: x.repeat(x.shape[0], 1)[: x.shape[0]], "tokens x tokens tensor"),
        (
            lambda x, w: torch.outer(x[:, 0], x[:, 1]).topk(2, 1)[0].repeat(1, 4),
            "tokens x tokens tensor",
        ),
    ],
)
def test_operations_across_tokens_are_refused(function, reason):
    with pytest.raises(TraceError, match=reason):
        check_captured(graph_of(function), "OddForCausalLM")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.nn.functional.linear(x, w),
        lambda x, w: torch.softmax(x, -1) * x.mean(-1, keepdim=True),
        lambda x, w: torch.cat((x[:, :4], x[:, 4:].cumsum(1)), 1),
        lambda x, w: x.topk(8, dim=-1)[0],
    ],
)
def test_operations_within_a_token_pass(function):
    check_captured(graph_of(function), "FineForCausalLM")


def test_nothing_captured_is_refused():
    captured = capture(
        lambda w, x, logits_index: (x @ w).index_select(0, logits_index),
        {"w": (8, 8)},
        {"x": ("T", 8), "logits_index": ("S",)},
    )
    with pytest.raises(TraceError, match="does not route its attention"):
        check_captured(captured.graph, "OddForCausalLM")
