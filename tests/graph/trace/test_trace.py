"""Tracing unmodified models: what the graph holds, and what is refused."""

import importlib.util
import json
import sys

import pytest
import torch
from support_models import hf_config, hf_model, tiny_model, tiny_spec, tiny_traced

from girih.graph.files.spec import load_spec
from girih.graph.ir.weight_plan import CONSTANT
from girih.graph.trace.trace import trace
from girih.kernels.base.errors import TraceError

ATTENTION = torch.ops.girih.attention.default
KINDS = ["llama", "qwen3", "gemma3_text"]


def attention_calls(traced):
    return traced.graph.find_nodes(op="call_function", target=ATTENTION)


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 4)])
def test_one_attention_per_layer_with_grouped_heads(kind, layers):
    calls = attention_calls(tiny_traced(kind))
    assert len(calls) == layers
    for call in calls:
        q, k, v = (a.meta["val"].shape[1:] for a in call.args[:3])
        assert (q, k, v) == ((4, 16), (2, 16), (2, 16))


def test_attention_facts():
    facts = [c.args[3:] for c in attention_calls(tiny_traced("llama"))]
    assert facts == [(16**-0.5, True, 0, 0.0, None)] * 2


def test_sliding_layers_and_own_scale():
    facts = [c.args[3:] for c in attention_calls(tiny_traced("gemma3_text"))]
    assert [f[2] for f in facts] == [8, 8, 0, 8]
    assert {f[0] for f in facts} == {32**-0.5}


def test_soft_cap():
    traced = tiny_traced("gemma2", num_hidden_layers=1, head_dim=16, attn_logit_softcapping=30.0)
    assert [c.args[6] for c in attention_calls(traced)] == [30.0]


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_three_tensors_and_named_weights(kind):
    traced = tiny_traced(kind)
    placeholders = traced.graph.find_nodes(op="placeholder")
    inputs = [n.meta["input"] for n in placeholders if "input" in n.meta]
    assert inputs == ["ids", "positions", "logits_index"]
    names = [n.meta["weight"] for n in placeholders if "weight" in n.meta]
    assert len(names) == len(set(names))
    assert set(names) == set(traced.weights.entries)
    assert set(traced.symbols.values()) == {"T", "S"}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_checkpoints_names_and_shapes(kind):
    model = hf_model(hf_config(kind))
    stored = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    entries = tiny_traced(kind).weights.entries.values()
    for entry in (e for e in entries if e.form != CONSTANT):
        assert stored[entry.name] == entry.shape


def test_tied_weights_are_one_entry():
    traced = tiny_traced("llama")
    assert "lm_head.weight" not in traced.weights.entries
    [table] = [
        n
        for n in traced.graph.find_nodes(op="placeholder")
        if n.meta.get("weight") == "model.embed_tokens.weight"
    ]
    assert {u.target for u in table.users} == {
        torch.ops.aten.embedding.default,
        torch.ops.aten.linear.default,
    }


def test_untied_weights_are_two_entries():
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(
        tiny_traced("qwen3").weights.entries
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_hidden_layers": 1, "rope_parameters": LLAMA3_ROPE}),
        ("gemma3_text", {}),
    ],
    ids=["llama", "llama3-rope", "gemma3"],
)
def test_constants_equal_the_models_buffers(kind, changes):
    traced = tiny_traced(kind, **changes)
    buffers = dict(hf_model(hf_config(kind, **changes)).named_buffers())
    assert traced.constants
    for name, value in traced.constants.items():
        torch.testing.assert_close(value, buffers[name], rtol=0, atol=0)
        assert traced.weights.entries[name].form == CONSTANT


def test_same_model_same_text_whatever_the_weights():
    other = trace(load_spec(str(tiny_model("llama", seed=1))))
    assert other.as_text() == tiny_traced("llama").as_text()
    assert other.key == tiny_traced("llama").key


def test_text_names_modules():
    assert "# model.layers.1.mlp.act_fn" in tiny_traced("llama").as_text()


def test_writes_in_place_become_values():
    changes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}  # scattered into a mask
    traced = tiny_traced("glm4_moe", num_hidden_layers=1, head_dim=16, **changes, **groups)
    mutable = [
        n
        for n in traced.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    ]
    assert mutable == []


def spec_of(path, config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, path / "model.safetensors")
    return load_spec(str(path))


def test_attention_that_is_written_out_is_refused():
    with pytest.raises(TraceError, match=r"CpmAntForCausalLM could not be traced"):
        trace(tiny_spec("cpmant", num_hidden_layers=1, dim_head=16, dim_ff=32))


def test_experts_are_one_op_per_projection():
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    traced = tiny_traced("qwen3_moe", num_hidden_layers=1, head_dim=16, **changes)
    [up, down] = traced.graph.find_nodes(
        op="call_function", target=torch.ops.girih.expert_linear.default
    )
    assert up.meta["val"].shape[1:] == (2, 64)
    assert down.meta["val"].shape[1:] == (2, 64)
    entry = traced.weights.entries[up.args[1].meta["weight"]]
    [conversion] = entry.sources
    assert len(conversion.sources) == 8  # gate and up of four experts


def test_unknown_architecture_is_refused(tmp_path):
    config = {"model_type": "zeppelin", "architectures": ["ZeppelinForCausalLM"]}
    with pytest.raises(TraceError, match=r"ZeppelinForCausalLM .*cannot be built.*zeppelin"):
        trace(spec_of(tmp_path, config))


def test_encoder_decoder_is_refused(tmp_path):
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    with pytest.raises(TraceError, match="AutoModelForCausalLM") as caught:
        trace(spec_of(tmp_path, config))
    assert len(str(caught.value)) < 800


ODD = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "girih_odd"


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, input_ids, **options):
        if input_ids.sum() > 3:  # depends on data
            input_ids = input_ids + 1
        return super().forward(input_ids=input_ids, **options)
"""


def test_data_dependent_control_flow_names_the_line(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "models").mkdir()
    source = tmp_path / "models" / "modeling_odd.py"
    source.write_text(ODD)
    found = importlib.util.spec_from_file_location("girih_test_odd", source)
    module = importlib.util.module_from_spec(found)
    sys.modules["girih_test_odd"] = module
    found.loader.exec_module(module)
    AutoConfig.register("girih_odd", module.OddConfig)
    AutoModelForCausalLM.register(module.OddConfig, module.OddForCausalLM)
    config = {**hf_config("llama").to_dict(), "model_type": "girih_odd"}
    config["architectures"] = ["OddForCausalLM"]
    line = 1 + ODD.splitlines().index("        if input_ids.sum() > 3:  # depends on data")
    with pytest.raises(TraceError, match=rf"OddForCausalLM .*modeling_odd\.py:{line} in .*forward"):
        trace(spec_of(tmp_path / "odd", config))
