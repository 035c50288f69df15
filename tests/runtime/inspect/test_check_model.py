"""`girih check`: random weights of the model's own configuration, against transformers."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from support_models import tiny_model

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.files.model_files import save_model
from girih.graph.files.spec import load_spec
from girih.graph.tiles.inductor import eager_tile
from girih.graph.trace.trace import trace
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import CapacityError, ConfigError, TraceError
from girih.kernels.base.target import detect_isa, resolve_target
from girih.passes.build.build import lower_and_partition
from girih.passes.build.key import bundle_key
from girih.runtime.inspect import check_model as module
from girih.runtime.inspect.check_model import check_model, random_model
from girih.runtime.verify.model import bind, verify_model
from girih.serve.cli.main import main


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch):
    """Models of one configuration are traced once; their weights are random each time."""
    monkeypatch.setattr(module, "trace", lambda spec, progress: traced(spec))


_TRACED = {}


def traced(spec):
    key = bundle_key(spec, config().opt, resolve_target()).digest
    if key not in _TRACED:
        _TRACED[key] = trace(spec)
    return _TRACED[key]


def config(*words):
    return to_engine_config(compose_config("check", ["opt=O0", *words]))


def test_a_model_is_verified_and_the_table_says_on_what():
    report = check_model(config(f"model={tiny_model('llama')}"))
    assert report.result.passed
    assert report.result.num_same == report.result.num_tokens == 48
    assert "2 of 2 layers" in report.text and "48/48" in report.text
    last = report.text.splitlines()[-1]
    assert last.startswith("model verified: logits of 3 sequences with transformers; worst")


def test_fewer_layers_keep_the_kinds_of_the_first_ones():
    report = check_model(config(f"model={tiny_model('gemma3_text')}"), layers=3)
    assert report.result.passed, report.text
    assert "3 of 4 layers" in report.text and "4 pieces" in report.text


def test_an_encoder_s_hidden_states_are_compared(tmp_path):
    from transformers import BertConfig, BertModel

    small = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    save_model(BertModel(small), tmp_path)
    report = check_model(config(f"model={tmp_path}"))
    assert report.result.passed, report.text
    assert report.result.num_tokens == 0 and "hidden states" in report.text


def test_a_classifier_is_refused(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    small = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    save_model(BertForSequenceClassification(small), tmp_path)
    with pytest.raises(ConfigError, match="BertForSequenceClassification classifies"):
        check_model(config(f"model={tmp_path}"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A random model, and its program with weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("random")
    settings = AutoConfig.from_pretrained(tiny_model("llama"))
    model = random_model(AutoModelForCausalLM, settings)
    save_model(model, directory)
    spec = load_spec(str(directory))
    _, program = lower_and_partition(traced(spec), config().opt, resolve_target())
    with open_checkpoint(spec.files) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, detect_isa())
    return model, program, weights


def found(parts, layout=None, spoil=None):
    model, program, weights = parts
    tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
    if spoil:
        last = list(tiles)[-1]
        right = tiles[last]
        tiles[last] = lambda inputs: [spoil(value) for value in right(inputs)]
    return verify_model(
        model, bind(layout or program.layout, tiles, weights, "reference"), 400, False
    )


def test_the_right_program_passes(parts):
    assert found(parts).passed


def test_a_small_difference_of_logits_is_wrong(parts):
    result = found(parts, spoil=lambda x: x * 1.001)
    assert not result.passed and result.error > result.bound
    assert re.fullmatch(r"logits \d+ of sequence 0", result.first_difference)


def test_another_mask_is_wrong(parts):
    layout = parts[1].layout
    steps = tuple(
        dataclasses.replace(s, spec=dataclasses.replace(s.spec, window=4))
        if hasattr(s, "spec") else s
        for s in layout.steps
    )  # fmt: skip
    assert not found(parts, dataclasses.replace(layout, steps=steps)).passed


def test_logits_that_say_nothing_are_inconclusive(parts):
    model, program, weights = parts
    zero = {n: torch.zeros_like(w) for n, w in weights.items()}
    silent = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in silent.parameters():
            parameter.zero_()
    tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
    result = verify_model(silent, bind(program.layout, tiles, zero, "reference"), 400, False)
    assert not result.passed and result.first_difference.startswith("inconclusive: logits")


@pytest.mark.parametrize("layers", [0, 3])
def test_a_number_of_layers_it_does_not_have(layers):
    with pytest.raises(ConfigError, match=f"check.layers is {layers}; this model has 1 to 2"):
        check_model(config(f"model={tiny_model('llama')}"), layers)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    monkeypatch.setattr(module, "random_model", None)
    with pytest.raises(CapacityError, match=r"set check\.layers=N to compare fewer of its 2"):
        check_model(config(f"model={tiny_model('llama')}"))


def test_an_architecture_girih_refuses_is_refused_with_its_line(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(
        "doge", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    settings.architectures = ["DogeForCausalLM"]
    settings.save_pretrained(tmp_path)
    save_model(random_model(AutoModelForCausalLM, settings), tmp_path)
    with pytest.raises(TraceError, match=r"a mask of its own making.*modeling_doge\.py:\d+"):
        check_model(config(f"model={tmp_path}"))


def test_the_command_prints_the_table_and_its_exit_code_tells(capsys, monkeypatch, tmp_path):
    words = ["check", f"model={tiny_model('llama')}", "opt=O0", "check.layers=1", "-q"]
    assert main(words) == 0
    assert "1 of 2 layers" in capsys.readouterr().out
    monkeypatch.setattr("girih.runtime.verify.model.TOLERANCE", 1e-12)
    assert main(words) == 1
    assert "model FAILED: " in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["No"]}))
    assert main(["check", f"model={tmp_path}", "-q"]) == 1
    assert "girih: " in capsys.readouterr().err
