"""Recurrent reference ops: continued states equal one run, and both equal what the formulas say."""

import pytest
import torch
from torch.nn import functional as F

from girih.kernels.ops.experts import expert_linear
from girih.kernels.ops.state import STATE_OPS

T = 11


def arguments(name):
    torch.manual_seed(3)
    q, k, v = torch.randn(T, 2, 8), torch.randn(T, 2, 8), torch.randn(T, 4, 6)
    decay = -torch.rand(T, 4, 1)
    return {
        "causal_conv": [torch.randn(T, 5), torch.randn(5, 4), torch.randn(5)],
        "linear_attention": [q, k, v, decay],
        "delta_rule": [q, k / k.norm(dim=-1, keepdim=True), v, decay, torch.rand(T, 4)],
        "selective_scan": [
            torch.randn(T, 6), torch.rand(T, 6), -torch.rand(6, 3), torch.randn(T, 3),
            torch.randn(T, 3),
        ],
        "gated_sum": [torch.randn(T, 7), torch.rand(T, 7)],
        "wkv": [torch.randn(T, 5), torch.randn(T, 5), -torch.rand(5), torch.randn(5)],
        "mlstm": [
            torch.randn(T, 2, 8), torch.randn(T, 2, 8), torch.randn(T, 2, 6), torch.randn(T, 2),
            F.logsigmoid(torch.randn(T, 2)), torch.tensor([1e-6]),
        ],
        "running_mean": [torch.randn(T, 5)],
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", STATE_OPS)
def test_state_carries_from_step_to_step(name):
    op, values = STATE_OPS[name], arguments(name)
    whole = getattr(torch.ops.girih, name)(*values)
    states = op.new_states(values)
    parts = []
    for start, stop in ((0, 4), (4, 5), (5, T)):
        rows = [v[start:stop] if op.is_per_token(i) else v for i, v in enumerate(values)]
        parts.append(op.run(rows, states))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STATE_OPS)
def test_shape_rule(name):
    values = [v.to("meta") for v in arguments(name)]
    op = getattr(torch.ops.girih, name)
    assert op(*values).shape == op(*arguments(name)).shape


def test_convolution_is_torchs():
    x, weight, bias = arguments("causal_conv")
    padded = F.pad(x.t()[None], (3, 0))
    expected = F.conv1d(padded, weight[:, None], bias, groups=5)[0].t()
    torch.testing.assert_close(torch.ops.girih.causal_conv(x, weight, bias), expected)


def test_linear_attention_is_masked_products():
    q, k, v, g = arguments("linear_attention")
    q, k = q.repeat_interleave(2, 1), k.repeat_interleave(2, 1)
    total = g[:, :, 0].cumsum(0)
    scores = torch.einsum("ihd,jhd->hij", q, k)
    scores = scores * (total[:, None] - total[None]).permute(2, 0, 1).exp().tril()
    expected = torch.einsum("hij,jhv->ihv", scores, v)
    found = torch.ops.girih.linear_attention(*arguments("linear_attention"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_running_mean_is_the_mean_so_far():
    [x] = arguments("running_mean")
    expected = torch.stack([x[: t + 1].mean(0) for t in range(T)])
    torch.testing.assert_close(torch.ops.girih.running_mean(x), expected)


def test_wkv_is_a_weighted_mean():
    k, v, decay, first = arguments("wkv")
    for t in (0, 4, T - 1):
        distance = torch.arange(t - 1, -1, -1.0)[:, None]  # of each earlier token
        logits = torch.cat((k[:t] + decay * distance, (k[t] + first)[None]))
        expected = (torch.softmax(logits, 0) * v[: t + 1]).sum(0)
        found = torch.ops.girih.wkv(k, v, decay, first)[t]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_delta_rule_overwrites_what_a_key_held():
    key = F.one_hot(torch.tensor([[2], [2]]), 8).float()  # twice the same unit key
    v = torch.tensor([[[1.0, 2.0]], [[5.0, 6.0]]])
    out = torch.ops.girih.delta_rule(key, key, v, torch.zeros(2, 1, 1), torch.ones(2, 1))
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_choice", [False, True])
def test_experts_are_linears(transposed, per_choice):
    torch.manual_seed(0)
    weight, bias = torch.randn(3, 6, 4), torch.randn(3, 6)
    x = torch.randn(5, 2, 4) if per_choice else torch.randn(5, 4)
    experts = torch.tensor([[0, 2], [1, 3], [2, 2], [-1, 0], [1, 0]])  # 3 and -1: no expert
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    found = expert_linear(x, stored, bias, experts, transposed)
    for token, choice in [(t, c) for t in range(5) for c in range(2)]:
        row = x[token, choice] if per_choice else x[token]
        expert = int(experts[token, choice])
        known = 0 <= expert < 3
        expected = weight[expert] @ row + bias[expert] if known else torch.zeros(6)
        torch.testing.assert_close(found[token, choice], expected)
