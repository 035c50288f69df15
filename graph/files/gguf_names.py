"""Differences between GGUF and Hugging Face tensors: names, row order, norm offset.

Owns one table row per GGUF architecture; knows no file and no torch.

llama.cpp renames every tensor when it converts a model, and for some architectures it also changes
values: Llama's q and k rows are reordered from half-split rotary pairs to interleaved ones, and
Gemma's norm weights (which act as 1 + w) are stored with the 1 added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from girih.kernels.base.errors import SourceError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True)
class GgufFamily:
    """Differences of one architecture's tensors.

    Attributes:
        block: tensor stem inside a block → module path inside a Hugging Face layer.
        interleaved_rope: q and k rows must be put back into half-split order.
        norms_plus_one: norm weights are stored as 1 + w.
    """

    block: dict[str, str] = field(default_factory=lambda: dict(_BLOCK))
    interleaved_rope: bool = False
    norms_plus_one: bool = False


FAMILIES = {
    "llama": GgufFamily(interleaved_rope=True),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(block={**_BLOCK, **_QK_NORMS}),
    "phi3": GgufFamily(block={**_BLOCK, **_FUSED}),
    "gemma2": GgufFamily(block={**_BLOCK, **_FOUR_NORMS}, norms_plus_one=True),
    "gemma3": GgufFamily(block={**_BLOCK, **_QK_NORMS, **_FOUR_NORMS}, norms_plus_one=True),
}


def family_of(metadata: dict[str, Any], where: str) -> GgufFamily:
    """The family of a file's architecture.

    Raises:
        SourceError: the architecture is missing or not one of `FAMILIES`.
    """
    architecture = metadata.get("general.architecture")
    family = FAMILIES.get(str(architecture))
    if family is None:
        raise SourceError(
            f"{where} has GGUF architecture {architecture!r}; girih reads "
            f"{', '.join(sorted(FAMILIES))}; use the model's Hugging Face directory instead"
        )
    return family


def hf_name(family: GgufFamily, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None if the family has no such tensor."""
    stem, dot, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block:
        inner = family.block.get(block[2])
        return f"model.layers.{block[1]}.{inner}{dot}{kind}" if inner else None
    outer = _OUTER.get(stem)
    return f"{outer}{dot}{kind}" if outer else None


def rotary_heads(family: GgufFamily, metadata: dict[str, Any], name: str) -> int | None:
    """Heads whose rows are interleaved in this tensor, or None when its rows are in order."""
    if not family.interleaved_rope:
        return None
    arch = metadata["general.architecture"]
    num_heads = metadata.get(f"{arch}.attention.head_count")
    if ".attn_q." in name:
        return num_heads
    if ".attn_k." in name:
        return metadata.get(f"{arch}.attention.head_count_kv", num_heads)
    return None


def has_norm_offset(family: GgufFamily, name: str) -> bool:
    """True if the stored values are the model's plus one."""
    return family.norms_plus_one and name.endswith("norm.weight")
