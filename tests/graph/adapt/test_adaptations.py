"""Adaptations: each is of a class that is there, put back afterwards, and needed."""

import importlib
import pkgutil

import pytest
import torch
from support_architectures import auto_of, families, tiny_config
from support_families import check_family

from girih.graph.adapt.adaptations import Adaptations
from girih.graph.adapt.adapted_classes import METHODS
from girih.graph.files.model_files import save_model
from girih.graph.files.spec import load_spec
from girih.graph.ir.text import graph_text
from girih.graph.trace.trace import trace
from girih.runtime.inspect.check_model import random_model

# The family whose model holds each adapted class.
FAMILY = {
    "GPTNeoSelfAttention": "gpt_neo",
    "GPTNeoXJapaneseAttention": "gpt_neox_japanese",
    "Attention": "openai-gpt",
    "XGLMSinusoidalPositionalEmbedding": "xglm",
    "XGLMAttention": "xglm",
    "TrOCRAttention": "trocr",
    "FalconAttention": "falcon",
    "BloomAttention": "bloom",
    "MptAttention": "mpt",
    "MiniMaxLightningAttention": "minimax",
    "RecurrentGemmaRecurrentBlock": "recurrent_gemma",
    "RecurrentGemmaRglru": "recurrent_gemma",
    "RwkvSelfAttention": "rwkv",
    "RwkvFeedForward": "rwkv",
    "xLSTMBackend": "xlstm",
    "ZayaCCAProjection": "zaya",
    "DeepseekV32Indexer": "deepseek_v32",
    "GlmMoeDsaIndexer": "glm_moe_dsa",
    "AXK2Indexer": "axk2",
    "HYV4Indexer": "hy_v4",
    "Dots3NoteTextIndexer": "dots3_note_text",
    "Qwen4ExpTextQSAIndexer": "qwen4_exp_text",
    "DbrxExperts": "dbrx",
    "LongcatFlashExperts": "longcat_flash",
    "Llama4TextMoe": "llama4_text",
    "JetMoeTopKGating": "jetmoe",
    "JetMoeParallelExperts": "jetmoe",
    "JetMoeMoE": "jetmoe",
    "JetMoeMoA": "jetmoe",
}
FAMILIES = {family.name: family for family in families()}


def tiny(family):
    """The family's model on the meta device."""
    with torch.device("meta"):
        return auto_of(family).from_config(tiny_config(family), attn_implementation="eager")


def test_every_adaptation_has_a_family():
    assert set(FAMILY) == set(METHODS)
    assert set(FAMILY.values()) <= set(FAMILIES)


@pytest.mark.parametrize("name", ["FalconAttention", "RwkvFeedForward", "JetMoeMoA"])
def test_methods_are_replaced_inside_and_put_back(name):
    model = tiny(FAMILIES[FAMILY[name]])
    owner = next(type(m) for m in model.modules() if type(m).__name__ == name)
    before = {method: owner.__dict__[method] for method in METHODS[name]}
    with Adaptations(model) as adaptations:
        assert name in adaptations.applied
        assert all(owner.__dict__[m] is replacement for m, replacement in METHODS[name].items())
    assert {method: owner.__dict__[method] for method in METHODS[name]} == before


def test_a_class_of_another_name_is_left_alone():
    assert Adaptations(tiny(FAMILIES["llama"])).applied == []


def test_every_adapted_method_is_one_of_a_class_of_transformers():
    """A class that transformers renames would otherwise silently lose its adaptation."""
    import transformers.models

    missing = dict(METHODS)
    for name, methods in METHODS.items():
        folder = {
            "openai-gpt": "openai",
            "dots3_note_text": "dots3_note",
            "llama4_text": "llama4",
            "qwen4_exp_text": "qwen4_exp",
        }
        family = folder.get(FAMILY[name], FAMILY[name])
        path = f"transformers.models.{family}.modeling_{family}"
        if name in vars(importlib.import_module(path)):
            owner = vars(importlib.import_module(path))[name]
            assert set(methods) <= set(owner.__dict__), name
            del missing[name]
    assert not missing, [m.name for m in pkgutil.iter_modules(transformers.models.__path__)]


@pytest.mark.slow
def test_llama4_runs_the_chosen_experts_only(monkeypatch, tmp_path):
    """Without its adaptation it agrees too, at the cost of every expert for every token."""
    save_model(
        random_model(auto_of(FAMILIES["llama4_text"]), tiny_config(FAMILIES["llama4_text"])),
        tmp_path,
    )
    text = graph_text(trace(load_spec(str(tmp_path))).graph)
    assert "girih.expert_linear" in text and "aten.repeat" not in text
    monkeypatch.delitem(METHODS, "Llama4TextMoe")
    assert "aten.repeat" in graph_text(trace(load_spec(str(tmp_path))).graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILY) - {"Llama4TextMoe"}))
def test_each_adaptation_is_needed(name, monkeypatch, tmp_path):
    """Without it the family does not agree, or a module stays eager that would not."""
    family = FAMILIES[FAMILY[name]]
    whole = check_family(family, tmp_path / "with")
    assert whole.passed
    monkeypatch.delitem(METHODS, name)
    row = check_family(family, tmp_path / "without")
    assert not row.passed or row.eager > whole.eager, f"{name} is not needed"
