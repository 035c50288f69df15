"""Tiny GGUF files, written the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, BLOCKS = 64, 4, 2, 16, 96, 2
BYTES = [chr(b) for b in range(33, 127)]  # printable ASCII stands for itself in byte-level BPE
SPECIAL = ["<|end|>", "<|turn|>"]
TOKENS = [*SPECIAL, *BYTES, "Ġ", "he", "hel", "lo"]
MERGES = ["h e", "he l", "l o"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|turn|>{% endfor %}"


def to_interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Half-split rotary rows → interleaved pairs, one index at a time (the converter's order)."""
    head_dim = rows.shape[0] // num_heads
    half = head_dim // 2
    out = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(half):
            out[head * head_dim + 2 * i] = rows[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = rows[head * head_dim + half + i]
    return out


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A tiny Llama's float32 weights by Hugging Face name."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN)}
    for i in range(BLOCKS):
        at = f"model.layers.{i}."
        tensors[at + "input_layernorm.weight"] = 1 + draw(HIDDEN)
        tensors[at + "self_attn.q_proj.weight"] = draw(HEADS * HEAD_DIM, HIDDEN)
        tensors[at + "self_attn.k_proj.weight"] = draw(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[at + "self_attn.v_proj.weight"] = draw(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[at + "self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        tensors[at + "post_attention_layernorm.weight"] = 1 + draw(HIDDEN)
        tensors[at + "mlp.gate_proj.weight"] = draw(FFN, HIDDEN)
        tensors[at + "mlp.up_proj.weight"] = draw(FFN, HIDDEN)
        tensors[at + "mlp.down_proj.weight"] = draw(HIDDEN, FFN)
    tensors["model.norm.weight"] = 1 + draw(HIDDEN)
    return tensors


GGUF_STEMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    """The name llama.cpp gives a tiny Llama's tensor."""
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if hf_name in outer:
        return outer[hf_name]
    _, _, block, stem = hf_name.removesuffix(".weight").split(".", 3)
    return f"blk.{block}.{GGUF_STEMS[stem]}.weight"


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, quant: Quant) -> np.ndarray:
    """Write one tensor in `quant`; returns the float32 values a reader must get back."""
    if quant == Quant.F32:
        writer.add_tensor(name, values)
        return values
    if quant == Quant.F16:
        half = values.astype(np.float16)
        writer.add_tensor(name, half)
        return half.astype(np.float32)
    packed = quantize(values, quant)
    writer.add_tensor(name, packed, raw_dtype=quant)
    return dequantize(packed, quant)


def finish(writer: GGUFWriter) -> None:
    """Write header, metadata and tensors, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(
    path: Path,
    quant: Quant = Quant.Q8_0,
    extra: dict[str, np.ndarray] | None = None,
    pairs: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a tiny Llama with a byte-level tokenizer.

    Matrices are stored in `quant`, vectors in float32. Returns the values that a reader must see,
    by Hugging Face name (computed without the code under test).
    """
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in (pairs or {}).items():
        writer.add_string(key, value)
    expected = {}
    for name, values in llama_tensors().items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = to_interleaved(values, heads) if heads else values
        got = add_tensor(writer, gguf_name(name), stored, quant if values.ndim == 2 else Quant.F32)
        if heads:
            order = to_interleaved(np.arange(values.shape[0])[:, None], heads)[:, 0]
            got = got[np.argsort(order)]
        expected[name] = got
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return expected
