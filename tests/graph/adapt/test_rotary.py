"""Every kind of rotary embedding within and beyond its original length, against transformers."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from support_engines import eager_llm
from support_models import tiny_model
from transformers import AutoModelForCausalLM

from girih import SamplingParams
from girih.graph.files.rotary_facts import read_rotary
from girih.graph.files.spec import load_spec
from girih.kernels.base.errors import ConfigError
from girih.runtime.start.launch import build_engine
from girih.serve.offline.options import engine_config

ORIGINAL, LONGEST, TOKENS = 32, 128, 6


def rope(kind, **fields):
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


def longrope(size, **fields):
    """Factors for `size` frequencies, far apart."""
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(size)],
        "long_factor": [1.0 + i for i in range(size)],
    }
    original = {"original_max_position_embeddings": ORIGINAL}
    return rope("longrope", **factors, **original, **fields)


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
PHI3 = {"original_max_position_embeddings": ORIGINAL, "head_dim": 16}
GEMMA = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def by_layer(full):
    return {"sliding_attention": rope("default"), "full_attention": full}


MODELS = {
    "default": ("llama", {"rope_parameters": rope("default")}),
    "linear": ("llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "dynamic": ("llama", {"rope_parameters": rope("dynamic", factor=4.0)}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn with mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16}},
    ),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "proportional": (
        "llama",
        {"rope_parameters": rope("proportional", partial_rotary_factor=0.5)},
    ),
    "partial": (
        "phi3",
        {"rope_parameters": rope("default", partial_rotary_factor=0.5), "head_dim": 16},
    ),
    "by layer, yarn": ("gemma3_text", {"rope_parameters": by_layer(YARN), **GEMMA}),
    "by layer, dynamic": (
        "gemma3_text",
        {"rope_parameters": by_layer(rope("dynamic", factor=4.0)), **GEMMA},
    ),
}
LONGROPES = {
    "llama": ("llama", {"rope_parameters": longrope(8)}),
    "partial": ("phi3", {"rope_parameters": longrope(4, partial_rotary_factor=0.5), **PHI3}),
    "by layer": ("gemma3_text", {"rope_parameters": by_layer(longrope(8)), **GEMMA}),
}


def path_of(model, longest=LONGEST):
    kind, changes = model
    return tiny_model(kind, **{"max_position_embeddings": longest, **changes})


def reference(path, prompt):
    """What transformers continues with, each time from the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check(path, lengths, **options):
    """Sequences of these lengths, in one batch, go on as in transformers."""
    prompts = [[(7 * i + 3 * n) % 400 for i in range(n)] for n in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm = eager_llm(path, dtype="float32", num_blocks=64, threads=1, **options)
    outputs = llm.generate(prompts, greedy)
    llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference(path, prompt), len(prompt)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sequences_of_any_length_are_as_in_transformers(model):
    check(path_of(model), [5, ORIGINAL - 3, ORIGINAL + 20, LONGEST - TOKENS])


@pytest.mark.parametrize("model", LONGROPES.values(), ids=LONGROPES)
def test_longrope_beyond_the_original_length(model, caplog):
    check(path_of(model), [ORIGINAL + 1, ORIGINAL + 20, LONGEST - TOKENS])
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(f"start with model.max_model_len={ORIGINAL} where" in text for text in warnings)


@pytest.mark.parametrize("model", LONGROPES.values(), ids=LONGROPES)
def test_longrope_within_the_original_length(model, caplog):
    lengths = [3, ORIGINAL // 2, ORIGINAL - TOKENS]
    check(path_of(model), lengths, max_model_len=ORIGINAL)
    assert "longrope" not in caplog.text


def test_short_and_long_factors_are_different_programs():
    path = str(path_of(LONGROPES["llama"]))
    keys = {longest: load_spec(path, longest=longest).key for longest in (8, ORIGINAL, 33, None)}
    assert keys[8] == keys[ORIGINAL] != keys[33] == keys[None]
    plain = str(path_of(MODELS["yarn"]))
    assert load_spec(plain, longest=8).key == load_spec(plain).key


def test_yarn_reaches_what_it_was_stretched_to():
    """Added by hand to a configuration, as model cards say, it leaves the original limit there."""
    path = path_of(MODELS["yarn"], longest=ORIGINAL)
    assert load_spec(str(path)).max_position == 4 * ORIGINAL
    check(path, [5, ORIGINAL + 20, 4 * ORIGINAL - TOKENS])


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "llama3", "by layer, dynamic"])
def test_lengths_a_model_was_not_made_for_are_refused_with_its_rotary_embedding(name):
    path = str(path_of(MODELS[name]))
    kind = name.removeprefix("by layer, ")
    with pytest.raises(
        ConfigError, match=rf"at most {LONGEST} tokens \(rotary embedding: .*{kind}"
    ):
        build_engine(engine_config(path, {"opt": "O0", "max_model_len": LONGEST + 1}))


@pytest.mark.parametrize(
    ("config", "kinds", "short", "reach"),
    [
        ({}, (), None, None),
        ({"rope_theta": 1e4, "rope_scaling": None}, (), None, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear",), None, None),
        ({"rope_scaling": {"type": "su", "long_factor": []}, "max_position_embeddings": 9,
          "original_max_position_embeddings": 4}, ("longrope",), 4, None),
        ({"rope_scaling": {"type": "yarn", "long_factor": []}, "max_position_embeddings": 9},
         ("longrope",), 9, None),
        ({"rope_parameters": by_layer(YARN)}, ("default", "yarn"), None, 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ("yarn",), None, None),
        ({"rope_parameters": "x"}, (), None, None),
        ({"rope_parameters": {"a": {"rope_type": 5}, "b": None}}, ("5",), None, None),
    ],
)  # fmt: skip
def test_facts(config, kinds, short, reach):
    facts = read_rotary(json.loads(json.dumps(config)))
    assert (facts.kinds, facts.short_length, facts.reach) == (kinds, short, reach)
