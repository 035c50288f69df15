"""The paged KV cache's memory layout, as shapes and torch code (any device).

Keys lie transposed in their block, so that scores of neighbouring slots are one vector; values
lie by slot, so that neighbouring outputs are one vector. bfloat16 keeps pairs together along the
summed dimension (head dim for keys, slots for values), as the packed weights do:

    float32, float16   keys [N, Hkv, D, S]        values [N, Hkv, S, Dv]
    bfloat16           keys [N, Hkv, D/2, S, 2]   values [N, Hkv, S/2, Dv, 2]
    int8               keys [N, Hkv, D+4, S]      values [N, Hkv, Dv+4, S]

An int8 block of a head is its elements, [D, S] keys or [S, Dv] values, and then the scales: S
float32, one per token, its largest magnitude / 127.

N blocks of S slots each; block 0 is the null block, whose content is never read.
"""

from __future__ import annotations

import torch

from girih.kernels.base.errors import ConfigError

SCALE_BYTES = 4
"""Beside each key and each value of a head in an int8 cache."""


def kv_cache_shapes(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one layer's key cache and value cache.

    Raises:
        ConfigError: block_size is not a multiple of 16, or a head size not a multiple of 8.
    """
    if block_size < 16 or block_size % 16:
        raise ConfigError(f"block_size is {block_size}; it must be a positive multiple of 16")
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if size < 8 or size % 8:
            raise ConfigError(f"{name} is {size}; it must be a positive multiple of 8")
    if dtype == torch.int8:
        return (
            (num_blocks, num_kv_heads, head_dim + SCALE_BYTES, block_size),
            (num_blocks, num_kv_heads, head_dim_v + SCALE_BYTES, block_size),
        )
    if dtype == torch.bfloat16:
        return (
            (num_blocks, num_kv_heads, head_dim // 2, block_size, 2),
            (num_blocks, num_kv_heads, block_size // 2, head_dim_v, 2),
        )
    return (
        (num_blocks, num_kv_heads, head_dim, block_size),
        (num_blocks, num_kv_heads, block_size, head_dim_v),
    )


def block_size_of(key_cache: torch.Tensor) -> int:
    """Return the number of slots in a block of this key cache."""
    return int(key_cache.shape[3])


def write_tokens(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k [T, Hkv, D] and v [T, Hkv, Dv] to their slots; tokens with slot -1 are skipped."""
    keep = slot_mapping >= 0
    slots, k, v = slot_mapping[keep], k[keep], v[keep]
    size = block_size_of(key_cache)
    block, offset = slots // size, slots % size
    if key_cache.dtype == torch.int8:
        parts = _int8_parts(key_cache, value_cache)
        for (elements, scales), tokens in zip(parts, (k, v), strict=True):
            elements[block, :, offset], scales[block, :, offset] = quantise(tokens)
    elif key_cache.dim() == 5:
        key_cache[block, :, :, offset] = k.unflatten(2, (k.shape[2] // 2, 2))
        value_cache[block, :, offset // 2, :, offset % 2] = v
    else:
        key_cache[block, :, :, offset] = k
        value_cache[block, :, offset] = v


def read_context(
    key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `length` tokens held by `blocks`: keys [L, Hkv, D], values [L, Hkv, Dv]."""
    used = blocks[: -(-length // block_size_of(key_cache))].long()
    keys, values = key_cache[used], value_cache[used]
    count = keys.shape[0] * block_size_of(key_cache)
    if key_cache.dtype == torch.int8:
        parts = _int8_parts(keys.contiguous(), values.contiguous())
        keys, values = (
            (part.float() * scales[..., None]).transpose(1, 2) for part, scales in parts
        )
    elif key_cache.dim() == 5:
        keys = keys.permute(0, 3, 1, 2, 4)
        values = values.permute(0, 2, 4, 1, 3)
    else:
        keys = keys.permute(0, 3, 1, 2)
        values = values.permute(0, 2, 1, 3)
    hkv = key_cache.shape[1]
    return keys.reshape(count, hkv, -1)[:length], values.reshape(count, hkv, -1)[:length]


def quantise(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 elements like `tokens` and float32 scales over the last dimension.

    A product of both is the token again, to half a scale.
    """
    wide = tokens.float()
    scales = wide.abs().amax(-1) / 127
    steps = torch.where(scales > 0, scales, 1.0)
    return (wide / steps[..., None]).round().clamp(-127, 127).to(torch.int8), scales


def _int8_parts(
    key_cache: torch.Tensor, value_cache: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of an int8 cache: (keys [N, Hkv, S, D], scales [N, Hkv, S]), then values likewise."""
    parts = []
    for cache, is_transposed in ((key_cache, True), (value_cache, False)):
        blocks, heads, rows, size = cache.shape
        flat = cache.view(blocks, heads, rows * size)
        elements, scales = flat.split([(rows - SCALE_BYTES) * size, SCALE_BYTES * size], -1)
        if is_transposed:
            elements = elements.unflatten(2, (rows - SCALE_BYTES, size)).transpose(2, 3)
        else:
            elements = elements.unflatten(2, (size, rows - SCALE_BYTES))
        parts.append((elements, scales.view(torch.float32)))
    return parts
