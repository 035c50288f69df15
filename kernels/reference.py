"""Pure-torch reference of every op: any device, float32 accumulation, no C++ library.

Written to be read, not to be fast; the CPU library is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels import kv_layout
from girih.kernels.packing import pack_rows, unpack_linear


@dataclass(frozen=True)
class Masking:
    """The facts of one attention layer that do not depend on the batch.

    Attributes:
        scale: factor on q·k.
        causal: a token sees no later token.
        window: a token sees itself and `window - 1` tokens before it; 0 means no limit.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 means none.
        sinks: [H] logits that take part in the softmax without a value, or None.
    """

    scale: float
    causal: bool
    window: int
    softcap: float
    sinks: torch.Tensor | None = None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, masking: Masking
) -> torch.Tensor:
    """Dense attention of queries at positions first, first+1, … over keys at 0 … L-1.

    Args:
        q: [Q, H, D].
        k: [L, Hkv, D], H a multiple of Hkv.
        v: [L, Hkv, Dv].
        first: position of the first query in the sequence of keys.
        masking: scale, mask, soft cap and sinks.

    Returns:
        [Q, H, Dv] in q's dtype.
    """
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads = k.shape[:2]
    group = num_heads // num_kv_heads
    queries = q.float().view(num_queries, num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", queries, k.float()) * masking.scale
    if masking.softcap:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    row = torch.arange(num_queries, device=q.device)[:, None] + first
    column = torch.arange(length, device=q.device)[None]
    visible = torch.ones((num_queries, length), dtype=torch.bool, device=q.device)
    if masking.causal:
        visible &= column <= row
    if masking.window:
        visible &= column > row - masking.window
    scores = scores.masked_fill(~visible, -torch.inf)
    if masking.sinks is not None:
        sink = masking.sinks.float().view(num_kv_heads, group, 1, 1)
        scores = torch.cat((scores, sink.expand(-1, -1, num_queries, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :length]
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float())
    return out.reshape(num_queries, num_heads, v.shape[2]).to(q.dtype)


def attention(  # noqa: PLR0913 (the schema's arguments)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Reference of `girih::attention`: one sequence, no cache."""
    return attend(q, k, v, 0, Masking(scale, causal, window, softcap, sinks))


def paged_attention(  # noqa: PLR0913 (the schema's arguments)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Reference of `girih::paged_attention`; arguments as in `girih.kernels.ops`."""
    kv_layout.write_tokens(key_cache, value_cache, k, v, slot_mapping)
    masking = Masking(scale, causal, window, softcap, sinks)
    out.zero_()
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        keys, values = kv_layout.read_context(key_cache, value_cache, block_table[request], length)
        first = length - (end - begin)
        # What lies before the first query's window may sit in freed blocks: never read it.
        hidden = max(0, first - window + 1) if window else 0
        out[begin:end] = attend(
            q[begin:end], keys[hidden:], values[hidden:], first - hidden, masking
        )
    out[slot_mapping < 0] = 0


def pack_linear_(packed: torch.Tensor, weight_rows: torch.Tensor, row_start: int) -> None:
    """Reference of `girih::pack_linear_`."""
    pack_rows(packed, weight_rows, row_start)


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int
) -> torch.Tensor:
    """Reference of `girih::packed_linear`."""
    weight = unpack_linear(packed, n, x.shape[1])
    out = x.float() @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
