"""Pure-torch reference of every op: any device, float32 accumulation, no C++ library.

Written to be read, not to be fast; the CPU library is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels.kv import layout as kv_layout
from girih.kernels.ops.packing import pack_rows, unpack_linear


@dataclass(frozen=True)
class Masking:
    """The facts of one attention layer that do not depend on the batch.

    Attributes:
        scale: factor on q·k.
        causal: a token sees no later token.
        window: a token sees itself and `window - 1` tokens before it, and as many after it when not
            causal; 0 means no limit.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 means none.
        sinks: [H] logits that take part in the softmax without a value, or None.
        slopes: [H]; a key `d` tokens before the query scores `slope * d` less (ALiBi), or None.
        chunk: a token sees only its own chunk of this many tokens; 0 means no chunks.
    """

    scale: float
    causal: bool
    window: int
    softcap: float
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    chunk: int = 0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    masking: Masking,
    skip: int = 0,
) -> torch.Tensor:
    """Dense attention of queries at positions first, first+1, … over keys at skip … L-1.

    Args:
        q: [Q, H, D].
        k: [L, Hkv, D], H a multiple of Hkv.
        v: [L, Hkv, Dv].
        first: position of the first query in the sequence of keys.
        masking: scale, mask, soft cap and sinks.
        skip: keys before this position are not looked at.

    Returns:
        [Q, H, Dv] in q's dtype.
    """
    num_queries, num_heads, head_dim = q.shape
    k, v = k[skip:], v[skip:]
    length, num_kv_heads = k.shape[:2]
    group = num_heads // num_kv_heads
    queries = q.float().view(num_queries, num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", queries, k.float()) * masking.scale
    if masking.softcap:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    row = torch.arange(num_queries, device=q.device)[:, None] + first
    column = torch.arange(length, device=q.device)[None] + skip
    if masking.slopes is not None:
        slopes = masking.slopes.float().view(num_kv_heads, group, 1, 1)
        scores = scores + slopes * (column - row)
    scores = scores.masked_fill(~_visible(row, column, masking), -torch.inf)
    if masking.sinks is not None:
        sink = masking.sinks.float().view(num_kv_heads, group, 1, 1)
        scores = torch.cat((scores, sink.expand(-1, -1, num_queries, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :length]
    out = torch.einsum("hgqk,khd->qhgd", weights, v.float())
    return out.reshape(num_queries, num_heads, v.shape[2]).to(q.dtype)


def _visible(row: torch.Tensor, column: torch.Tensor, masking: Masking) -> torch.Tensor:
    """Which keys (columns) each query (row) sees, by their positions."""
    visible = (column <= row) if masking.causal else (column >= 0).expand(len(row), -1)
    if masking.window:
        visible = visible & (column > row - masking.window) & (column < row + masking.window)
    if masking.chunk:
        visible = visible & (column // masking.chunk == row // masking.chunk)
    return visible


def attention(  # noqa: PLR0913 (the schema's arguments)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    chunk: int = 0,
) -> torch.Tensor:
    """Reference of `girih::attention`: one sequence, no cache."""
    return attend(q, k, v, 0, Masking(scale, causal, window, softcap, sinks, slopes, chunk))


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
    slopes: torch.Tensor | None = None,
    chunk: int = 0,
) -> None:
    """Reference of `girih::paged_attention`; arguments as in `girih.kernels.ops.schemas`.

    Beside them, `slopes` and `chunk` as in `Masking`.
    """
    kv_layout.write_tokens(key_cache, value_cache, k, v, slot_mapping)
    masking = Masking(scale, causal, window, softcap, sinks, slopes, chunk)
    out.zero_()
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        if begin == end:
            continue
        keys, values = kv_layout.read_context(key_cache, value_cache, block_table[request], length)
        first = length - (end - begin)
        # What lies before the first query's window may sit in freed blocks: never read it.
        hidden = _first_needed(first, masking)
        out[begin:end] = attend(q[begin:end], keys, values, first, masking, hidden)
    out[slot_mapping < 0] = 0


def _first_needed(position: int, masking: Masking) -> int:
    """Earliest position that a query at `position`, or after it, can see."""
    after_window = position - masking.window + 1 if masking.window else 0
    chunk_start = position // masking.chunk * masking.chunk if masking.chunk else 0
    return max(0, after_window, chunk_start)


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
