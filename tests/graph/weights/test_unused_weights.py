"""What a checkpoint holds and the program does not read."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import program_of, tiny_model, tiny_traced

from girih.graph.files.spec import load_spec
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.graph.weights.unused import check_unused
from girih.kernels.base.errors import SourceError, WeightError
from girih.kernels.base.target import detect_isa


@pytest.fixture(scope="module")
def program():
    return program_of(tiny_traced("llama"))


@pytest.fixture
def changed(tmp_path):
    """Factory of (plan, checkpoint, spec) of a copy of the tiny Llama with other tensors."""
    opened = []

    def make(tensors=None, config=None, program=None):
        source = tiny_model("llama")
        for file in source.glob("*.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        stored = {**load_file(source / "model.safetensors"), **(tensors or {})}
        save_file(stored, tmp_path / "model.safetensors")
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, **(config or {})}))
        spec = load_spec(str(tmp_path), task="generate")
        opened.append(open_checkpoint(spec.files))
        return program.weights, opened[-1], spec

    yield make
    for checkpoint in opened:
        checkpoint.close()


def test_a_checkpoint_that_is_read_in_full(program, changed, caplog):
    assert check_unused(*changed(program=program)) == []
    assert caplog.text == ""


def test_a_bias_of_a_module_that_runs_is_refused(program, changed):
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    with pytest.raises(WeightError, match=r"q_proj\.bias, but LlamaForCausalLM as configured") as e:
        check_unused(*changed(extra, program=program))
    assert "attention_bias" in str(e.value)


def test_scales_of_quantised_weights_are_refused(program, changed):
    extra = {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(WeightError, match=r"weight_scale_inv.*Quantised weights are not read"):
        check_unused(*changed(extra, program=program))


def test_what_belongs_to_nothing_that_runs_is_named_once(program, changed, caplog):
    extra = {f"vision_tower.{n}.bias": torch.ones(2) for n in range(5)}
    extra["model.rotary_emb.inv_freq"] = torch.ones(4)
    with caplog.at_level(logging.WARNING):
        left = check_unused(*changed(extra, program=program))
    assert len(left) == 6
    (line,) = caplog.messages
    assert line.startswith("5 of ")
    assert "vision_tower.0.bias, vision_tower.1.bias, vision_tower.2.bias, …" in line


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_of_its_own_where_the_configuration_ties_it(is_same, changed):
    tied = program_of(tiny_traced("llama", tie_word_embeddings=True))
    source = tiny_model("llama", tie_word_embeddings=True)
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    head = table.clone() if is_same else table + 1
    stored = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    given = changed(stored, {"tie_word_embeddings": True}, tied)
    if is_same:
        assert check_unused(*given) == ["lm_head.weight"]
        return
    with pytest.raises(WeightError, match='write "tie_word_embeddings": false into'):
        check_unused(*given)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float8_e4m3fn, "stored as float8_e4m3fn. Quantised weights are read from GGUF only"),
        (torch.int8, "is stored as int8; the configuration asks for float32"),
    ],
)
def test_quantised_tensors_are_not_read_as_if_they_were_values(dtype, message, program, changed):
    name = "model.layers.0.mlp.up_proj.weight"
    shape = load_file(tiny_model("llama") / "model.safetensors")[name].shape
    plan, checkpoint, _ = changed({name: torch.ones(shape).to(dtype)}, program=program)
    with pytest.raises(WeightError, match=message):
        load_weights(plan, checkpoint, program.constants, detect_isa())


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_configuration_of_quantised_weights_is_refused(where, tmp_path):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    config = quantised if where == "top" else {"text_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"quant_method 'fp8'\); girih reads float32"):
        load_spec(str(tmp_path))
