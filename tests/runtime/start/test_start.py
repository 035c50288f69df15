"""What a start says of itself before anything is built."""

import json

import pytest
import transformers
from support_models import tiny_model

from girih.graph.files.safetensors_file import write_safetensors
from girih.kernels.base.errors import ConfigError, SourceError
from girih.runtime.records.messages import Progress
from girih.runtime.start.context import start_of
from girih.runtime.start.launch import build_engine, explain
from girih.serve.offline.options import engine_config


def test_the_model_is_announced_and_only_front_ends_learn_where_it_is():
    """`detail` is shown to anybody who asks for /ready."""
    events = []
    start = start_of(engine_config(str(tiny_model("llama")), {"opt": "O0"}), events.append)
    (event,) = [event for event in events if event.stage == "model"]
    assert event.detail == start.spec.name
    assert "/" not in event.detail
    assert event.model_path == str(start.spec.files.path)
    assert Progress.of(event).as_event() == event


def start_for(path, length=None, **config):
    """A start from a directory without a tokenizer and with one weight."""
    if config:
        (path / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    layout = {"w": ("float32", (1,))}
    write_safetensors(path / "model.safetensors", layout, lambda name: memoryview(bytes(4)))
    return start_of(engine_config(str(path), {"opt": "O0", "max_model_len": length}))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("Mpt", 2048), ("Rwkv", 1024), ("GPT2", 1024), ("Mamba", None), ("Bloom", None)],
)
def test_the_length_of_a_model_as_transformers_writes_its_configuration(tmp_path, kind, limit):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    assert start_for(tmp_path, 64).model_length == 64
    if limit is None:
        assert start_for(tmp_path, 1 << 20).model_length == 1 << 20
        for unnamed in (None, "auto"):
            with pytest.raises(SourceError, match=r"none of .*; set model\.max_model_len"):
                _ = start_for(tmp_path, unnamed).model_length
    else:
        assert start_for(tmp_path).model_length == limit
        with pytest.raises(ConfigError, match=f"was made for at most {limit} tokens"):
            _ = start_for(tmp_path, limit + 1).model_length


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; it must be a whole"),
        ({"max_position_embeddings": 8.5}, "max_position_embeddings is 8.5; it must be a whole"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True; it must be a whole"),
        ({"vocab_size": None}, "vocab_size is missing; it must be a whole number of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a whole number of at least 1"),
        ({"vocab_size": [3]}, "vocab_size is [3]; it must be a whole number"),
        ({"index_topk": "all"}, "index_topk is 'all'; it must be a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id"),
        ({"eos_token_id": [2, "</s>"]}, "eos_token_id is [2, '</s>']; it must be a token id"),
    ],
)
def test_a_malformed_configuration_is_refused_before_anything_is_built(tmp_path, config, words):
    good = {"vocab_size": 8, "max_position_embeddings": 16.0, "eos_token_id": [2, 3]}
    start = start_for(tmp_path, **good)
    start.require_facts()
    assert (start.model_length, start.spec.eos_token_ids) == (16, (2, 3))
    start = start_for(tmp_path, **good | config)
    for build in (build_engine, explain):
        with pytest.raises(SourceError) as caught:
            build(start.config)
        assert f"{tmp_path / 'config.json'}: {words}" in str(caught.value)


def test_malformed_stop_ids_of_a_generation_configuration_name_that_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    start = start_for(tmp_path, vocab_size=8, max_position_embeddings=16)
    with pytest.raises(SourceError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        start.require_facts()


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], {"a": 1}])
def test_architectures_must_be_class_names(tmp_path, names):
    with pytest.raises(SourceError, match=r"config\.json: architectures is .* list of class names"):
        start_for(tmp_path, architectures=names)
