"""Tiny configurations of every text decoder and encoder family of transformers.

One table: the settings all families share under their various names, and per family only what it
needs beside them (layer patterns, sizes that must divide one another).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

# Settings by every name that families give them; a family takes the ones its configuration knows.
SHARED: dict[str, Any] = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embedding_dim": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "dff": 96,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "dim_ff": 96, "hidden_dim": 96,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "decoder_layers": 4, "num_blocks": 4,
    "n_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "attention_heads": 4, "n_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "n_positions": 512, "model_max_length": 512,
    "max_seq_len": 512, "n_ctx": 512, "context_length": 512,
    "head_dim": 16, "dim_head": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "dense_intermediate_size": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "zero_expert_num": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "window_size": 8,
    "index_topk": 512, "index_head_dim": 16, "index_n_heads": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16, "mamba_dt_rank": 8,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_d_ssm": 128, "n_mamba_heads": 2, "n_groups": 2, "mamba_n_groups": 1, "time_step_rank": 8,
    "chunk_size": 8, "mamba_chunk_size": 8, "block_size": 8,
}  # fmt: skip

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class Family:
    """One architecture family.

    Attributes:
        name: transformers' model_type, behind "emb:" for an embedding model.
        kind: "decoder", or "encoder": hidden states instead of logits, one step per sequence.
        settings: configuration beside `SHARED`; a value None removes the shared setting.
    """

    name: str
    kind: str = "decoder"
    settings: dict[str, Any] = field(default_factory=dict)


def tiny_config(family: Family) -> Any:
    """The transformers configuration of a family's tiny model."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family.name.removeprefix("emb:")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = {*kind().to_dict(), *getattr(kind, "attribute_map", {})}
        chosen = {key: value for key, value in SHARED.items() if key in known}
        chosen |= family.settings
        return kind(**{key: value for key, value in chosen.items() if value is not OMIT})


def auto_of(family: Family) -> Any:
    """transformers' class that builds a family's model."""
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModel if family.kind == "encoder" else AutoModelForCausalLM


class _Omit:
    """Marks a shared setting that a family must not be given."""


OMIT: Any = _Omit()


_PLAIN = """
    llama mistral ministral ministral3 qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 vaultgemma phi
    phi3 phimoe gpt2 gpt_bigcode gpt_neox opt bloom mpt stablelm starcoder2 cohere
    cohere2 cohere2_moe granite granite_swa granitemoe granitemoe_swa granitemoeshared olmo olmo2
    olmo3 olmoe flex_olmo mixtral jetmoe glm glm4 glm4_moe gpt_oss llama4_text minimax_m2
    minimax_m3_vl_text ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe smollm3 nemotron seed_oss
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 dots1 apertus arcee helium bitnet internlm3 persimmon xglm
    biogpt ctrl openai-gpt afmoe aria_text cwm diffllama doge dory flint hrm_text hyperclovax
    iquestcoder jais2 kolibri1 laguna mellum modernbert-decoder moshi nanochat sarvam_moe solar_open
    gpt_neox_japanese trocr apertus1p5_text falcon rwkv cpmant xlnet blt deepseek_v4 inkling_text
    mimo_v2_flash gemma4_unified_text mamba falcon_mamba
"""
_LATENT = """
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 minicpm3 axk1 axk2
    sarvam_mla youtu
"""
_ENCODERS = """
    bert roberta xlm-roberta modernbert distilbert electra mpnet deberta-v2 nomic_bert
    jina_embeddings_v3 eurobert gte
"""

MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": OMIT}
HYBRID = {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}

_SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "olmo_hybrid": {**HYBRID, "linear_num_key_heads": 4},
    "lara_mini": {},
    "kimi_linear": {**MLA, **HYBRID},
    "bailing_hybrid": {**MLA, "layer_group_size": 2},
    "gemma3_text": {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    "gemma3n_text": {
        "num_hidden_layers": 8, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 16,
        "layer_types": [SLIDING, FULL, SLIDING, FULL] * 2, "laurel_rank": 8,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 16, "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64,
        },
    },
    "minimax": {"layer_types": [LINEAR, FULL, LINEAR, FULL], "head_dim": 16},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", FULL, "mlp"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "bamba": {"attn_layer_indices": [2]},
    "zamba": {
        "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2,
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32, "n_mamba_heads": 8, "mamba_headdim": 16, "kv_channels": 16,
        "num_query_groups": 4, "adapter_rank": 8,
        "layers_block_type": [LINEAR, LINEAR, "hybrid"] * 2, "num_mem_blocks": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "xlstm": {"chunk_size": 64},  # chunks are computed in bfloat16, whole sequences are not
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "conv", FULL, "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", FULL, "conv"]},
    "lfm3": {},
    "recurrent_gemma": {"lru_width": 64, "num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 4,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "longcat_flash": {**MLA, "head_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dots3_note_text": {
        **MLA, "per_layer_config": {}, "head_dim": 24,
        "layer_types": [SLIDING, "indexed_attention"] * 2,
    },
    "fuyu": {
        "text_config": {
            "model_type": "persimmon", "vocab_size": 128, "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
        "patch_size": 4, "image_size": 8,
    },
}  # fmt: skip


_EMBEDDERS: dict[str, dict[str, Any]] = {
    "emb:qwen3": {},
    "emb:gemma3_text": {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "use_bidirectional_attention": True,
    },
}  # fmt: skip

# Families that do not compile, with what their refusal must say.
REFUSED: dict[str, str] = {
    "blt": "not built: patch lengths depend on the entropies of a second model",
    "cpmant": "could not be traced",
    "deepseek_v4": "DeepseekV4Attention passes its attention a mask of its own making",
    "doge": "DogeAttention passes its attention a mask of its own making",
    "inkling_text": "InklingAttention needs attention with 'position_bias'",
    "inkling2_text": "unsupported",
    "xlnet": "could not be traced",
    "mpnet": "does not route its attention through transformers' attention interface",
    "deberta-v2": "does not route its attention through transformers' attention interface",
}


def families() -> list[Family]:
    """Every family, decoders first, by name."""
    decoders = [Family(name) for name in _PLAIN.split()]
    decoders += [Family(name, settings=MLA) for name in _LATENT.split()]
    decoders += [Family(name, settings=settings) for name, settings in _SPECIAL.items()]
    encoders = [Family(name, "encoder") for name in _ENCODERS.split()]
    encoders += [Family(name, "encoder", settings) for name, settings in _EMBEDDERS.items()]
    return [*sorted(decoders, key=lambda f: f.name), *encoders]
