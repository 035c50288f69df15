"""A paged batch with random contents, for attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels.attention.backends import AttentionSpec
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.kv.layout import kv_cache_shapes, write_tokens


@dataclass
class PagedCase:
    """Arguments of one call; caches start as NaN except where the context was written."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    keys: list[torch.Tensor]  # per request [L, Hkv, D]
    values: list[torch.Tensor]

    def arguments(self, spec: AttentionSpec, sinks: torch.Tensor | None = None) -> tuple:
        return (
            *(self.q, self.k, self.v, self.key_cache, self.value_cache, self.query_start),
            *(self.seq_lens, self.block_table, self.slot_mapping, spec.scale, spec.causal),
            *(spec.window, spec.softcap, sinks),
        )

    @property
    def metadata(self) -> AttentionMetadata:
        tables, slots = (self.block_table,), (self.slot_mapping,)
        return AttentionMetadata(self.query_start, self.seq_lens, tables, slots)

    def clone_caches(self) -> None:
        self.key_cache, self.value_cache = self.key_cache.clone(), self.value_cache.clone()


def make_case(
    spec: AttentionSpec,
    requests: list[tuple[int, int]],
    dtype: torch.dtype,
    block_size: int = 16,
    padding: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Make a case of (new tokens, context length) per request; q and k are views of one tensor.

    Slots that nobody wrote hold NaN, in an int8 cache NaN scales.
    """
    kv_dtype = kv_dtype or dtype
    poison = -1 if kv_dtype == torch.int8 else torch.nan
    blocks = [-(-length // block_size) for _, length in requests]
    key_shape, value_shape = kv_cache_shapes(
        sum(blocks) + 1, block_size, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, kv_dtype
    )
    key_cache = torch.full(key_shape, poison, dtype=kv_dtype)
    value_cache = torch.full(value_shape, poison, dtype=kv_dtype)
    free = (torch.randperm(sum(blocks)) + 1).tolist()
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    tokens = sum(new for new, _ in requests) + padding
    merged = torch.randn(tokens, (spec.num_heads + spec.num_kv_heads) * spec.head_dim).to(dtype)
    split = spec.num_heads * spec.head_dim
    q = merged[:, :split].view(tokens, spec.num_heads, spec.head_dim)
    k = merged[:, split:].view(tokens, spec.num_kv_heads, spec.head_dim)
    v = torch.randn(tokens, spec.num_kv_heads, spec.head_dim_v).to(dtype)
    start, slots, all_keys, all_values = [0], [], [], []
    for row, (new, length) in enumerate(requests):
        mine = [free.pop() for _ in range(blocks[row])]
        table[row, : len(mine)] = torch.tensor(mine)
        place = torch.tensor(
            [mine[p // block_size] * block_size + p % block_size for p in range(length)]
        )
        keys = torch.randn(length, spec.num_kv_heads, spec.head_dim).to(dtype)
        values = torch.randn(length, spec.num_kv_heads, spec.head_dim_v).to(dtype)
        old = length - new
        write_tokens(key_cache, value_cache, keys[:old], values[:old], place[:old])
        k[start[-1] : start[-1] + new], v[start[-1] : start[-1] + new] = keys[old:], values[old:]
        start.append(start[-1] + new)
        slots += place[old:].tolist()
        all_keys.append(keys)
        all_values.append(values)
    slots += [-1] * padding
    return PagedCase(
        q, k, v, key_cache, value_cache,
        torch.tensor(start, dtype=torch.int32),
        torch.tensor([length for _, length in requests], dtype=torch.int32),
        table, torch.tensor(slots), all_keys, all_values,
    )  # fmt: skip
