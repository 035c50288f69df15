"""The pure-torch references against torch's own dense attention."""

import torch
import torch.nn.functional as F
from support_paged import make_case

from girih.kernels.attention.backends import AttentionSpec
from girih.kernels.ops import reference


def dense(q, k, v, mask, scale):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def test_paged_attention_equals_dense_attention_per_request():
    torch.manual_seed(0)
    for causal, window in ((True, 0), (True, 7), (False, 0)):
        spec = AttentionSpec(6, 2, 16, 24, 0.3, causal=causal, window=window)
        requests = [(5, 5), (1, 40), (0, 3), (20, 33)]
        case = make_case(spec, requests, torch.float32, padding=2)
        out = torch.full((28, 6, 24), torch.nan)
        reference.paged_attention(*case.arguments(spec), out)
        begin = 0
        for row, (new, length) in enumerate(requests):
            position = torch.arange(length - new, length)[:, None]
            column = torch.arange(length)[None]
            mask = (column <= position) | (not causal)
            if window:
                mask &= column > position - window
            want = dense(case.q[begin : begin + new], case.keys[row], case.values[row], mask, 0.3)
            if new:
                torch.testing.assert_close(out[begin : begin + new], want, atol=1e-5, rtol=1e-5)
            begin += new
        assert (out[-2:] == 0).all()


def test_softcap_and_sinks_by_hand():
    q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[3.0]]]), torch.tensor([[[5.0]]])
    sinks = torch.tensor([0.5])
    out = reference.attention(q, k, v, 1.0, True, 0, 4.0, sinks)
    score = 4.0 * torch.tanh(torch.tensor(6.0 / 4.0))
    want = 5.0 * torch.exp(score) / (torch.exp(score) + torch.exp(sinks[0]))
    torch.testing.assert_close(out.flatten()[0], want)


def test_marker_op_equals_paged_reference():
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 8, 8, 0.5, window=5, softcap=10.0)
    case = make_case(spec, [(12, 12)], torch.float32)
    out = torch.empty(12, 4, 8)
    reference.paged_attention(*case.arguments(spec), out)
    marker = torch.ops.girih.attention(case.q, case.k, case.v, 0.5, True, 5, 10.0, None)
    torch.testing.assert_close(out, marker)
