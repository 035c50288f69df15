"""One bundle, checkpoints that name their tensors otherwise: the same weights are loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import program_of, tiny_model, tiny_traced

from girih.graph.files.spec import load_spec
from girih.graph.trace import weight_names
from girih.graph.trace.weight_names import plan_for_checkpoint
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import WeightError
from girih.kernels.base.target import detect_isa


def copied(source, target, change):
    """A copy of a model whose tensors went through `change`."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


def loaded(program, path):
    """The program's weights, out of a checkpoint."""
    spec = load_spec(str(path))
    with open_checkpoint(spec.files) as checkpoint:
        plan = plan_for_checkpoint(program.weights, checkpoint, spec)
        return load_weights(plan, checkpoint, program.constants, detect_isa())


def without_prefix(prefix):
    return lambda tensors: {name.removeprefix(prefix): t for name, t in tensors.items()}


@pytest.mark.parametrize(("kind", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
def test_a_checkpoint_of_the_base_model(kind, prefix, tmp_path):
    source = tiny_model(kind)
    program = program_of(tiny_traced(kind))
    bare = copied(source, tmp_path / "bare", without_prefix(prefix))
    assert any(name not in load_file(bare / "model.safetensors")
               for name in program.weights.checkpoint_names())  # fmt: skip
    expected, found = loaded(program, source), loaded(program, bare)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}


def stacked(tensors):
    """Experts as transformers holds them: one tensor for all of a layer."""
    kept = {name: t for name, t in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        part = {
            kind: torch.stack([tensors[f"{layer}.experts.{i}.{kind}.weight"] for i in range(3)])
            for kind in ("w1", "w2", "w3")
        }
        mlp = layer.replace("block_sparse_moe", "mlp")
        kept[f"{mlp}.experts.gate_up_proj"] = torch.cat((part["w1"], part["w3"]), 1)
        kept[f"{mlp}.experts.down_proj"] = part["w2"]
    return {name.replace("block_sparse_moe", "mlp"): t for name, t in kept.items()}


def test_experts_saved_stacked_fit_a_bundle_made_of_single_ones(tmp_path):
    source = tiny_model("mixtral", **EXPERTS)
    program = program_of(tiny_traced("mixtral", **EXPERTS))
    other = copied(source, tmp_path / "stacked", stacked)
    assert not set(program.weights.checkpoint_names()) <= set(
        load_file(other / "model.safetensors")
    )
    expected, found = loaded(program, source), loaded(program, other)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_names_that_fit_need_no_transformers(monkeypatch):
    def never(spec):
        raise AssertionError("the model was built")

    monkeypatch.setattr(weight_names, "build_on_meta", never)
    assert loaded(program_of(tiny_traced("llama")), tiny_model("llama", 1))


def test_a_tensor_under_no_name_is_still_an_error(tmp_path):
    def lossy(tensors):
        kept = without_prefix("model.")(tensors)
        del kept["layers.1.mlp.down_proj.weight"]
        return kept

    path = copied(tiny_model("llama"), tmp_path / "lossy", lossy)
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        loaded(program_of(tiny_traced("llama")), path)


def test_the_configuration_decides_the_key_whatever_the_names(tmp_path):
    source = tiny_model("llama")
    bare = copied(source, tmp_path / "bare", without_prefix("model."))
    config = json.loads((bare / "config.json").read_text())
    config["transformers_version"] = "4.0.0"
    (bare / "config.json").write_text(json.dumps(config))
    assert load_spec(str(bare)).key == load_spec(str(source)).key
