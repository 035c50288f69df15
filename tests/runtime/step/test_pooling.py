"""Models that embed or classify: the engine's vectors against transformers in float32."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from support_library import share_library
from support_pooling import (
    difference,
    engine,
    hidden_states,
    label_values,
    random_texts,
    vectors,
    write_pooled,
    write_sentence_layout,
)
from torch.nn.functional import normalize

from girih.conf.files import load_opt_level
from girih.kernels.base.errors import ConfigError, RequestError, SourceError, TraceError
from girih.runtime.observe.metrics import EngineMetrics
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.request import EngineRequest

RAW = PoolingParams(use_activation=False)
CLASSIFIERS = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "distilbert": {},
    "electra": {},
    "modernbert": {},
    "modernbert mean": {"classifier_pooling": "mean"},
    "eurobert": {"classifier_pooling": "mean"},
    "llama": {},
    "qwen2": {},
    "gpt2": {"n_positions": 160, "n_embd": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_agrees_packed_and_alone(name, tmp_path):
    model = write_pooled(tmp_path, name.split()[0], "classify", num_labels=3, **CLASSIFIERS[name])
    handle = engine(tmp_path)
    texts = random_texts()
    packed = vectors(handle, texts)
    assert handle.core.stats().num_steps == 1
    for ids, found in zip(texts, packed, strict=True):
        expected = label_values(model, ids)
        assert difference(found, expected.softmax(-1)) < 2e-5
        assert difference(vectors(handle, [ids], [RAW])[0], expected) < 5e-5
    assert len({tuple(found.round(4)) for found in packed}) == len(texts)
    assert handle.facts.task == "classify"
    assert handle.facts.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_the_texts_of_a_pair_are_told_apart_by_types(tmp_path):
    model = write_pooled(tmp_path, "bert", "classify", num_labels=1)
    handle = engine(tmp_path)
    texts = random_texts()
    types = [[0] * 5 + [1] * (len(ids) - 5) for ids in texts]
    asked = [PoolingParams(token_types=t) for t in types]
    for ids, kinds, found in zip(texts, types, vectors(handle, texts, asked), strict=True):
        expected = label_values(model, ids, kinds).sigmoid()
        assert difference(found, expected) < 2e-5
        assert difference(found, label_values(model, ids).sigmoid()) > 1e-3
    assert handle.facts.pooling.has_token_types


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, "sigmoid"),
        ({"problem_type": "regression", "num_labels": 3}, "identity"),
        ({"num_labels": 1}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
    ],
)
def test_the_activation_is_what_the_configuration_says(settings, activation, tmp_path):
    model = write_pooled(tmp_path, "distilbert", "classify", **settings)
    handle = engine(tmp_path)
    text = random_texts()[0]
    apply = {"sigmoid": torch.sigmoid, "identity": lambda x: x}[activation]
    assert handle.facts.pooling.activation == activation
    assert difference(vectors(handle, [text])[0], apply(label_values(model, text))) < 5e-5


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_an_encoder_embeds_by_its_first_token(kind, tmp_path):
    model = write_pooled(tmp_path, kind, "embed")
    handle = engine(tmp_path)
    texts = random_texts()
    for ids, found in zip(texts, vectors(handle, texts), strict=True):
        assert difference(found, normalize(hidden_states(model, ids)[0], dim=-1)) < 2e-5
    assert handle.facts.pooling.mode == "cls"


def test_positions_behind_the_padding_id_shorten_a_text(tmp_path):
    model = write_pooled(tmp_path, "roberta", "embed", max_position_embeddings=40)
    handle = engine(tmp_path)
    assert handle.facts.max_model_len == 39
    (text,) = random_texts((39,))
    expected = normalize(hidden_states(model, text)[0], dim=-1)
    assert difference(vectors(handle, [text])[0], expected) < 2e-5


@pytest.mark.parametrize("pooling", ["last", "mean", "all"])
def test_a_decoder_embeds_in_chunks_as_in_one_step(pooling, tmp_path):
    model = write_pooled(tmp_path, "llama", "generate")
    whole = engine(tmp_path, task="embed", pooling=pooling)
    chunked = engine(tmp_path, task="embed", pooling=pooling, max_num_batched_tokens=16)
    texts = random_texts((50, 9, 37))
    in_chunks = vectors(chunked, texts)
    assert chunked.core.stats().num_steps > 4
    for ids, a, b in zip(texts, vectors(whole, texts), in_chunks, strict=True):
        rows = hidden_states(model, ids)
        wanted = {"last": rows[-1:], "mean": rows.mean(0, keepdim=True), "all": rows}[pooling]
        expected = normalize(wanted, dim=-1).flatten()
        assert difference(a, expected) < 2e-5
        assert difference(b, expected) < 2e-5


def test_the_last_token_may_follow_a_cached_prefix_and_a_mean_may_not(tmp_path):
    model = write_pooled(tmp_path, "qwen2", "embed")
    (text,) = random_texts((50,))
    for pooling, hits in (("last", True), ("mean", False), ("all", False)):
        handle = engine(tmp_path, pooling=pooling)
        first, second = vectors(handle, [text])[0], vectors(handle, [text])[0]
        assert (handle.core.stats().kv_cache.prefix_hits > 0) == hits
        assert np.abs(first - second).max() < 1e-5
    rows = hidden_states(model, text)
    assert difference(first, normalize(rows, dim=-1).flatten()) < 2e-5


def test_a_preempted_text_is_computed_again(tmp_path):
    model = write_pooled(tmp_path, "llama", "embed")
    for pooling in ("last", "mean", "all"):
        handle = engine(
            tmp_path, pooling=pooling, num_blocks=11, max_model_len=160, max_num_batched_tokens=24
        )
        texts = random_texts((90, 80, 70))
        core = handle.core
        for number, ids in enumerate(texts):
            core.add_request(
                EngineRequest(
                    request_id=f"r{number}", prompt_token_ids=ids, pooling=PoolingParams()
                )
            )
        found, steps = {}, 0
        while core.has_work():
            steps += 1
            if steps == 3:
                core.scheduler.preempt_requests([r.request_id for r in core.scheduler.running])
            found.update((o.request_id, np.frombuffer(o.pooled, "<f4")) for o in core.step())
        for number, ids in enumerate(texts):
            rows = hidden_states(model, ids)
            wanted = {"last": rows[-1], "mean": rows.mean(0), "all": rows}[pooling]
            expected = normalize(wanted, dim=-1).flatten()
            assert difference(found[f"r{number}"], expected) < 2e-5
        core.check_integrity()


def test_a_text_that_is_aborted_leaves_nothing_behind(tmp_path):
    model = write_pooled(tmp_path, "llama", "embed")
    handle = engine(tmp_path, pooling="all", max_num_batched_tokens=16)
    core: Any = handle.core
    texts = random_texts((60, 50))
    for name, ids in zip("ab", texts, strict=True):
        core.add_request(
            EngineRequest(request_id=name, prompt_token_ids=ids, pooling=PoolingParams())
        )
    for _ in range(2):
        assert core.step() == []
    core.abort(["a"])
    found = []
    while core.has_work():
        found += core.step()
        core.check_integrity()
    assert [output.request_id for output in found] == ["b"]
    expected = normalize(hidden_states(model, texts[1]), dim=-1).flatten()
    assert difference(np.frombuffer(found[0].pooled, "<f4"), expected) < 2e-5
    vectors(handle, [texts[0]])  # the plan that tells of the ends before
    assert list(core.runner._texts) == ["r0"]


@pytest.mark.parametrize(("mode", "normalizes", "layers"), [
    ("mean_tokens", True, 0), ("cls_token", False, 0), ("lasttoken", True, 0),
    ("mean_tokens", True, 2),
])  # fmt: skip
def test_the_layout_of_sentence_transformers_is_read(mode, normalizes, layers, tmp_path):
    model = write_pooled(tmp_path, "bert", "embed")
    made = write_sentence_layout(tmp_path, mode, normalize=normalizes, layers=layers)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    handle = engine(tmp_path)
    texts = random_texts()
    for ids, found in zip(texts, vectors(handle, texts), strict=True):
        rows = hidden_states(model, ids)
        expected = {"mean_tokens": rows.mean(0), "cls_token": rows[0], "lasttoken": rows[-1]}[mode]
        with torch.no_grad():
            for layer in made:
                expected = layer(expected).tanh()
        expected = normalize(expected, dim=-1) if normalizes else expected
        assert difference(found, expected) < 2e-5
    assert handle.facts.task == "embed"
    assert handle.facts.max_model_len == 40
    assert handle.facts.pooling.width == (48 if layers else 64)


def test_embeddings_are_cut_before_they_are_normalised(tmp_path):
    model = write_pooled(tmp_path, "llama", "embed", matryoshka_dimensions=[16, 32])
    handle = engine(tmp_path)
    (text,) = random_texts((20,))
    asked = [PoolingParams(dimensions=16), PoolingParams(dimensions=16, use_activation=False)]
    cut, raw = vectors(handle, [text, text], asked)
    rows = hidden_states(model, text)[-1, :16]
    assert difference(cut, normalize(rows, dim=-1)) < 2e-5
    assert difference(raw, rows) < 2e-5
    assert handle.facts.pooling.can_cut
    assert handle.facts.pooling.dimensions == (16, 32)


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path):
    write_pooled(tmp_path, "bert", "embed")
    with pytest.raises(ConfigError, match=r"cannot generate; use\s+model.task=embed"):
        engine(tmp_path, task="generate")
    with pytest.raises(ConfigError, match="has no head that classifies"):
        engine(tmp_path, task="classify")
    handle = engine(tmp_path, max_num_batched_tokens=32)
    assert handle.facts.max_model_len == 32
    text = random_texts((33,))[0]
    request = EngineRequest(request_id="a", prompt_token_ids=text, pooling=PoolingParams())
    with pytest.raises(RequestError, match=r"33 tokens; a step, which takes texts whole .* 32"):
        handle.core.add_request(request)
    with pytest.raises(RequestError, match="task is 'embed'; it cannot serve a request to gene"):
        handle.core.add_request(EngineRequest(request_id="a", prompt_token_ids=[5]))


def test_pooling_that_means_nothing_or_is_not_known_is_refused(tmp_path):
    write_pooled(tmp_path, "llama", "embed")
    with pytest.raises(ConfigError, match="sees only those before it"):
        engine(tmp_path, pooling="cls")
    with pytest.raises(ConfigError, match=r"model.pooling is 'max'; it must be"):
        engine(tmp_path, pooling="max")
    write_sentence_layout(tmp_path, "max_tokens", normalize=True)
    with pytest.raises(SourceError, match="pools by max_tokens; known are"):
        engine(tmp_path)
    kinds = [{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    with pytest.raises(SourceError, match="asks for 'LSTM'"):
        engine(tmp_path)


def test_a_head_that_chooses_among_tokens_by_itself_is_refused(tmp_path):
    write_pooled(tmp_path, "ctrl", "classify", n_embd=64, dff=96, n_layer=2, n_head=4)
    with pytest.raises(TraceError, match="CTRLForSequenceClassification"):
        engine(tmp_path)


def test_more_texts_than_a_step_holds_wait_their_turn(tmp_path):
    model = write_pooled(tmp_path, "distilbert", "embed")
    handle = engine(tmp_path, max_num_batched_tokens=64, max_num_seqs=4, num_blocks=200)
    texts = random_texts(tuple(5 + (7 * i) % 50 for i in range(20)))
    for ids, found in zip(texts, vectors(handle, texts), strict=True):
        assert difference(found, normalize(hidden_states(model, ids)[0], dim=-1)) < 2e-5
    assert handle.core.stats().num_steps >= 8


def test_metrics_count_texts_and_no_output_tokens(tmp_path):
    write_pooled(tmp_path, "qwen2", "embed")
    handle = engine(tmp_path)
    metrics = EngineMetrics(handle.core, "tiny", 160)
    handle.core.observers.append(metrics)
    (text,) = random_texts((50,))
    vectors(handle, [text])
    vectors(handle, [text])
    lines = [line for line in metrics.text().splitlines() if line.startswith("girih:")]
    values = {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert values["girih:request_prompt_tokens_sum"] == 100
    assert values["girih:prompt_tokens_cached_total"] == 48
    assert values["girih:e2e_request_latency_seconds_count"] == 2
    assert values["girih:request_prefill_time_seconds_sum"] > 0
    for name in ("request_generation_tokens", "time_to_first_token_seconds"):
        assert values[f"girih:{name}_count"] == 0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cross-encoder with token types and a mean below its head, verified and compiled."""
    path = tmp_path_factory.mktemp("compiled")
    model = write_pooled(
        path / "model", "bert", "classify", num_labels=1, classifier_pooling="mean"
    )
    opt = dataclasses.replace(load_opt_level("O2"), verify=True)
    bundle = {"bundle": str(path / "bundle"), "bundle_missing": "build"}
    options = {"opt": opt, **bundle, "num_blocks": None}
    with pytest.MonkeyPatch.context() as patch:
        share_library(patch)
        return model, engine(path / "model", **options), options, path / "model"


def test_compiled_code_scores_as_eager_code_does(compiled):
    _, handle, options, path = compiled
    assert handle.report.bundle.status == "built"
    texts = random_texts((21, 9, 1, 30))
    asked = [
        PoolingParams(token_types=[0] * (n // 2) + [1] * (n - n // 2)) for n in map(len, texts)
    ]
    eager = vectors(engine(path), texts, asked)
    again = engine(path, **options)
    assert again.report.bundle.status == "found"
    assert "as recorded" in again.report.verified[-1].compared
    for found in (vectors(handle, texts, asked), vectors(again, texts, asked)):
        for a, b in zip(found, eager, strict=True):
            assert np.abs(a - b).max() < 1e-5
    assert "attention cpu_paged" in handle.report.attention


def test_a_mean_below_a_head_is_that_of_the_hidden_states(compiled):
    model, handle, _, _ = compiled
    texts = random_texts((21, 9))
    for ids, found in zip(texts, vectors(handle, texts), strict=True):
        with torch.no_grad():
            mean = hidden_states(model, ids).mean(0, keepdim=True)[None]
            value = model.classifier(model.bert.pooler(mean))[0].sigmoid()
        assert difference(found, value) < 2e-5
