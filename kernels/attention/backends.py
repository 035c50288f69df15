"""Attention backends: what each can do, and how a step runs on it.

    AttentionMetadata(...)                       once per step
    run(q, k, v, caches, metadata, group, spec)  once per layer

A backend answers `why_not(spec, dtype, block_size, kv_dtype)` with a reason or None;
`choose_backend` takes the first that has none and keeps the reasons of the others. Knows no model
and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import ConfigError
from girih.kernels.build import library
from girih.kernels.kv.layout import kv_cache_shapes
from girih.kernels.ops import reference

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "BackendChoice",
    "choose_backend",
    "kv_cache_shapes",
]

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class AttentionSpec:
    """The computation of one attention layer, independent of any batch.

    Attributes:
        num_heads: query heads H.
        num_kv_heads: key/value heads; divides H.
        head_dim: size of q and k.
        head_dim_v: size of v and of the output.
        scale: factor on q·k.
        causal: a token sees no later token.
        window: a token sees itself and `window - 1` before it (and after it when not causal);
            0 means no limit.
        softcap: `softcap * tanh(score / softcap)`; 0 means none.
        has_sinks: `run` gets one extra softmax logit per head.
        has_slopes: `run` gets one ALiBi slope per head.
        chunk: a token sees only its own chunk of this many tokens; 0 means no chunks.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False
    chunk: int = 0


class AttentionBackend:
    """Base of the backends: arguments are common, capability and kernel are not."""

    name = ""

    def why_not(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Return why this backend cannot run the layer, or None when it can."""
        raise NotImplementedError

    def run(  # noqa: PLR0913 (one argument per tensor of the op)
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        group: int,
        spec: AttentionSpec,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> None:
        """Write k, v to the cache and the attention of every request to `out` [T, H, Dv].

        Args:
            q: [T, H, D].
            k: [T, Hkv, D].
            v: [T, Hkv, Dv].
            key_cache: first shape of `kv_cache_shapes`.
            value_cache: second shape of `kv_cache_shapes`.
            metadata: of this step.
            group: KV group of this layer.
            spec: of this layer.
            out: [T, H, Dv]; rows of padding tokens become zero.
            sinks: [H], exactly when `spec.has_sinks`.
            slopes: [H], exactly when `spec.has_slopes`.
        """
        rare = (slopes, spec.chunk) if slopes is not None or spec.chunk else ()
        self._kernel(
            q,
            k,
            v,
            key_cache,
            value_cache,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_tables[group],
            metadata.slot_mappings[group],
            spec.scale,
            spec.causal,
            spec.window,
            spec.softcap,
            sinks,
            out,
            *rare,
        )

    def _kernel(self, *arguments: object) -> None:
        raise NotImplementedError


class CpuPagedBackend(AttentionBackend):
    """The C++ kernel of the loaded library."""

    name = "cpu_paged"

    def why_not(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Return why the C++ kernel cannot run the layer, or None when it can."""
        if not library.is_loaded():
            return "the CPU kernel library is not loaded"
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {dtype} is not bfloat16, float16 or float32"
        if spec.has_slopes or spec.chunk:
            return f"the C++ kernel has no {'ALiBi' if spec.has_slopes else 'chunked attention'}"
        if spec.window and not spec.causal:
            return "the C++ kernel has windows only in causal attention"
        return _cache_reason(dtype, kv_dtype) or _shape_reason(spec, block_size)

    def _kernel(self, *arguments: object) -> None:
        torch.ops.girih.paged_attention(*arguments)


class ReferenceBackend(AttentionBackend):
    """Pure torch, any device: dense attention request by request."""

    name = "reference"

    def why_not(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Return why the layer cannot be laid out in the cache, or None when it can."""
        if not dtype.is_floating_point:
            return f"dtype {dtype} is not a floating-point type"
        return _cache_reason(dtype, kv_dtype) or _shape_reason(spec, block_size)

    def _kernel(self, *arguments: object) -> None:
        reference.paged_attention(*arguments)  # type: ignore[arg-type]


BACKENDS: tuple[AttentionBackend, ...] = (CpuPagedBackend(), ReferenceBackend())
"""In order of preference."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend taken, and why the others were not.

    Attributes:
        backend: the one to use.
        reasons: (backend name, reason) of each that was asked before it and refused.
    """

    backend: AttentionBackend
    reasons: tuple[tuple[str, str], ...]


def choose_backend(
    spec: AttentionSpec,
    dtype: torch.dtype,
    block_size: int,
    only: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> BackendChoice:
    """Return the first backend that can run the layer.

    Args:
        spec: the layer.
        dtype: of q, k and v.
        block_size: slots per block.
        only: name of the one backend to consider; None considers all.
        kv_dtype: of the cache; None is `dtype`.

    Raises:
        ConfigError: no backend can, with each one's reason; or `only` names none.
    """
    names = [backend.name for backend in BACKENDS]
    if only is not None and only not in names:
        raise ConfigError(f"attention backend {only!r} is unknown; known are {', '.join(names)}")
    reasons: list[tuple[str, str]] = []
    for backend in BACKENDS:
        if only is not None and backend.name != only:
            continue
        reason = backend.why_not(spec, dtype, block_size, kv_dtype)
        if reason is None:
            return BackendChoice(backend, tuple(reasons))
        reasons.append((backend.name, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    raise ConfigError(f"no attention backend can run {spec}: {told}")


def _cache_reason(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
    if kv_dtype in (None, dtype, torch.int8):
        return None
    return f"a cache of {kv_dtype} is neither that of {dtype} nor int8"


def _shape_reason(spec: AttentionSpec, block_size: int) -> str | None:
    if block_size < 16 or block_size % 16:
        return f"block_size {block_size} is not a positive multiple of 16"
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if size % 8 or not 8 <= size <= MAX_HEAD_DIM:
            return f"{name} {size} is not a multiple of 8 between 8 and {MAX_HEAD_DIM}"
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} heads are not a multiple of {spec.num_kv_heads} kv heads"
    return None
