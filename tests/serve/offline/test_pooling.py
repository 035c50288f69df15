"""Embeddings, scores, rankings and classes over HTTP and in `LLM`, against transformers."""

import asyncio
import base64
import json
import time

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from support_library import share_library
from support_pooling import difference, hidden_states, label_values, write_pooled
from support_real_server import serving
from torch.nn.functional import normalize

from girih import LLM
from girih.kernels.base.errors import RequestError
from girih.runtime.records.pooling_params import PoolingParams
from girih.serve.cli import main as cli
from girih.serve.http.openapi import ROUTES
from girih.serve.text.texts import TextOptions, match_pairs
from girih.serve.text.tokenizer import load_tokenizer

TEXTS = ["The quick brown fox", "it sleeps.", "one two three four five six"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedder")
    model = write_pooled(path, "llama", "embed", matryoshka_dimensions=[16, 32])
    with serving(path, serve={"max_prompts": 8}, block_size=16) as url:
        yield path, model, url


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranker")
    model = write_pooled(path, "bert", "classify", num_labels=1)
    with serving(path) as url:
        yield path, model, url


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    labels = {"id2label": {0: "good", 1: "bad", 2: "neither"}}
    model = write_pooled(path, "distilbert", "classify", **labels)
    with serving(path) as url:
        yield path, model, url


def expected_embedding(path, model, text, width=64):
    ids = text if isinstance(text, list) else load_tokenizer(path).encode(text)
    return normalize(hidden_states(model, ids)[-1, :width], dim=-1)


def expected_score(path, model, first, second):
    ids, types = load_tokenizer(path).encode_framed(first, second)
    assert {0, 1} == set(types)
    return float(label_values(model, ids, types).sigmoid()[0])


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=60)


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# ---- embeddings ----


def test_the_openai_client_embeds(embedder):
    path, model, url = embedder
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
    for index, (text, item) in enumerate(zip(TEXTS, answer.data, strict=True)):
        assert item.index == index
        found = np.array(item.embedding, np.float32)
        assert difference(found, expected_embedding(path, model, text)) < 2e-5
    count = sum(len(load_tokenizer(path).encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    as_floats = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert as_floats.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)


def test_the_asynchronous_client_embeds_many_requests_at_once(embedder):
    path, model, url = embedder

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = (client.embeddings.create(model="tiny", input=t) for t in TEXTS * 4)
            return await asyncio.gather(*asked)

    for text, answer in zip(TEXTS * 4, asyncio.run(all_of_them()), strict=True):
        found = np.array(answer.data[0].embedding, np.float32)
        assert difference(found, expected_embedding(path, model, text)) < 2e-5


def test_inputs_may_be_ids_and_embeddings_may_be_cut(embedder):
    path, model, url = embedder
    ids = [[5, 6, 7, 8], [9, 10, 11]]
    whole = post(url, "/v1/embeddings", input=ids).json()["data"]
    single = post(url, "/v1/embeddings", input=ids[0]).json()["data"]
    for item, text in zip([*whole, *single], [*ids, ids[0]], strict=True):
        found = np.array(item["embedding"], np.float32)
        assert difference(found, expected_embedding(path, model, text)) < 2e-5
    body = {"input": ids[0], "dimensions": 16, "encoding_format": "base64"}
    cut = post(url, "/v1/embeddings", **body).json()["data"][0]["embedding"]
    found = np.frombuffer(base64.b64decode(cut), "<f4")
    assert difference(found, expected_embedding(path, model, ids[0], 16)) < 2e-5
    raw = post(url, "/v1/embeddings", input=ids[0], use_activation=False).json()["data"][0]
    found = np.array(raw["embedding"], np.float32)
    assert difference(found, hidden_states(model, ids[0])[-1]) < 2e-5


def test_texts_are_cut_only_when_asked(embedder):
    path, model, url = embedder
    long = "one two three four five six seven eight nine ten " * 20
    error = error_of(post(url, "/v1/embeddings", input=long))
    assert error["param"] == "input"
    assert "max_model_len allows at most 160" in error["message"]
    error = error_of(post(url, "/v1/embeddings", input="x" * 200_000))  # not even tokenized
    assert error["param"] == "input"
    answer = post(url, "/v1/embeddings", input=long, truncate_prompt_tokens=12).json()
    assert answer["usage"]["prompt_tokens"] == 12
    ids = load_tokenizer(path).encode_framed(long, limit=12)[0]
    assert ids[0] == 1
    assert ids[-1] == 2
    found = np.array(answer["data"][0]["embedding"], np.float32)
    assert difference(found, expected_embedding(path, model, ids)) < 2e-5
    answer = post(url, "/v1/embeddings", input=long, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == 160


def test_an_embedder_scores_by_the_cosine(embedder):
    path, model, url = embedder
    answer = post(url, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()
    query = expected_embedding(path, model, TEXTS[0])
    for item, text in zip(answer["data"], TEXTS, strict=True):
        cosine = float(query @ expected_embedding(path, model, text))
        assert item["score"] == pytest.approx(cosine, abs=1e-5)
    count = sum(len(load_tokenizer(path).encode(text)) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == count  # each text is computed once


def test_equal_prefixes_are_found_in_the_cache(embedder):
    _, _, url = embedder
    text = "def add(a, b): return a + b " * 4
    post(url, "/v1/embeddings", input=text)
    usage = post(url, "/v1/embeddings", input=text).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    salted = post(url, "/v1/embeddings", input=text, cache_salt="x").json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(("body", "param", "words"), [
    ({}, "input", "input is missing"),
    ({"input": []}, "input", "has 0 entries; it must have 1 to 8"),
    ({"input": ["a"] * 9}, "input", "9 entries; it must have 1 to 8 (serve.max_prompts)"),
    ({"input": [[]]}, "input", "text is empty"),
    ({"input": "", "add_special_tokens": False}, "input", "text is empty"),
    ({"input": [424]}, "input", "token id 424"),
    ({"input": [-1]}, "input", "token id -1"),
    ({"input": 7}, "input", "got 7"),
    ({"input": "\ud800"}, None, "JSON"),
    ({"input": "a", "dimensions": 24}, "dimensions", "one of 16, 32"),
    ({"input": "a", "dimensions": 0}, "dimensions", "one of 16, 32"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float or base64"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "2 marks"),
    ({"input": "a", "normalize": True}, "normalize", "use use_activation"),
    ({"input": "a", "priority": 3}, "priority", "schedules by 'fcfs'"),
    ({"input": "a", "cache_salt": ""}, "cache_salt", "1 to 128"),
])  # fmt: skip
def test_what_an_embedding_cannot_be_made_of_is_a_400(embedder, body, param, words):
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{embedder[2]}/v1/embeddings", content=content, headers=headers)
    error = error_of(answer)
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/inference/v1/generate", {"token_ids": [5]}),
    ("/v1/classify", {"input": "a"}),
])  # fmt: skip
def test_another_task_is_refused_with_the_one_there_is(embedder, path, body):
    error = error_of(post(embedder[2], path, **body))
    assert error["param"] == "model"
    assert "it embeds: use /v1/embeddings" in error["message"]


def test_the_model_card_says_how_it_pools(embedder):
    card = httpx.get(f"{embedder[2]}/v1/models/tiny").json()
    assert card["task"] == "embed"
    assert card["pooling"]["mode"] == "last"
    assert card["pooling"]["width"] == 64
    assert card["pooling"]["dimensions"] == [16, 32]
    assert card["default_sampling"] is None


def test_ids_and_unknown_fields_as_on_other_routes(embedder):
    url = embedder[2]
    answer = post(url, "/v1/embeddings", input="a", request_id="mine", colour="blue", user="me")
    assert answer.json()["id"] == "embd-mine"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-girih-ignored"] == "colour"


@pytest.mark.slow
def test_texts_are_embedded_while_the_model_compiles(embedder, tmp_path, monkeypatch):
    """Eager pieces answer at once, compiled code later, with vectors that are as good."""
    path, model, _ = embedder
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    share_library(monkeypatch)
    expected = [expected_embedding(path, model, text) for text in TEXTS]
    with serving(path, opt="O2", mode="background") as url:
        while True:
            phase = httpx.get(f"{url}/ready").json()["compiling"]["phase"]
            for item, vector in zip(
                post(url, "/v1/embeddings", input=TEXTS).json()["data"], expected, strict=True
            ):
                assert difference(np.array(item["embedding"], np.float32), vector) < 2e-5
            assert phase in ("tracing", "compiling", "checking", "done"), phase
            if phase == "done":
                break
            time.sleep(0.2)


# ---- scores and rankings ----


def test_a_cross_encoder_scores_pairs_with_their_types(ranker):
    path, model, url = ranker
    for route in ("/v1/score", "/score"):
        answer = post(url, route, text_1=TEXTS[0], text_2=TEXTS).json()
        for item, text in zip(answer["data"], TEXTS, strict=True):
            assert item["object"] == "score"
            assert item["score"] == pytest.approx(
                expected_score(path, model, TEXTS[0], text), abs=1e-5
            )
    others = post(url, "/v1/score", queries=TEXTS, documents=TEXTS[::-1]).json()["data"]
    for item, first, second in zip(others, TEXTS, TEXTS[::-1], strict=True):
        assert item["score"] == pytest.approx(expected_score(path, model, first, second), abs=1e-5)


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(ranker, route):
    path, model, url = ranker
    query, documents = TEXTS[2], [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    scores = [expected_score(path, model, query, text) for text in TEXTS]
    answer = post(url, route, query=query, documents=documents).json()
    found = answer["results"]
    assert [item["index"] for item in found] == sorted(range(3), key=lambda i: -scores[i])
    assert all(
        item["relevance_score"] == pytest.approx(scores[item["index"]], abs=1e-5)
        and item["document"] == {"text": TEXTS[item["index"]]}
        for item in found
    )
    assert answer["usage"]["prompt_tokens"] > 0
    best = post(url, route, query=query, documents=TEXTS, top_n=1, return_documents=False).json()
    assert best["results"] == [
        {"index": found[0]["index"], "relevance_score": pytest.approx(found[0]["relevance_score"])}
    ]


def test_long_pairs_are_cut_at_the_longer_text(ranker):
    path, _, url = ranker
    long = "one two three four five six seven eight nine ten " * 20
    error = error_of(post(url, "/v1/rerank", query=TEXTS[1], documents=[long]))
    assert "allows at most 160" in error["message"]
    body = {"query": TEXTS[1], "documents": [long], "max_tokens_per_doc": 30}
    assert post(url, "/v1/rerank", **body).json()["usage"]["prompt_tokens"] == 30
    tokenizer = load_tokenizer(path)
    whole = tokenizer.encode_framed(TEXTS[1], long)[0]
    ids, types = tokenizer.encode_framed(TEXTS[1], long, 30)
    query = tokenizer.encode_framed(TEXTS[1])[0]
    assert ids[: len(query)] == query  # the short one is whole
    assert ids[:29] == whole[:29]
    assert types == [0] * len(query) + [1] * (30 - len(query))


@pytest.mark.parametrize(("path", "body", "param", "words"), [
    ("/v1/score", {"text_1": "a"}, "text_2", "nothing is given for text_2"),
    ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1", "text_1, queries"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 texts and text_2 1"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_1", "at least one"),
    ("/v1/rerank", {"query": "a"}, "documents", "documents is missing"),
    ("/v1/rerank", {"documents": ["a"]}, "query", "query is missing"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "0 entries"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents", "has no text"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n is -1"),
    ("/v1/embeddings", {"input": "a"}, "model", "it classifies: use /v1/classify"),
])  # fmt: skip
def test_what_cannot_be_scored_is_a_400(ranker, path, body, param, words):
    error = error_of(post(ranker[2], path, **body))
    assert words in error["message"]
    assert error["param"] == param


# ---- classes ----


def test_a_classifier_names_the_label_and_its_probabilities(classifier):
    path, model, url = classifier
    answer = post(url, "/v1/classify", input=TEXTS).json()
    for index, (item, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
        expected = label_values(model, load_tokenizer(path).encode(text)).softmax(-1)
        assert item["index"] == index
        assert item["label"] == ["good", "bad", "neither"][int(expected.argmax())]
        assert item["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert item["num_classes"] == 3
    raw = post(url, "/classify", input=TEXTS[0], use_activation=False).json()["data"][0]
    expected = label_values(model, load_tokenizer(path).encode(TEXTS[0]))
    assert raw["probs"] == pytest.approx(expected.tolist(), abs=1e-4)
    error = error_of(post(url, "/v1/score", text_1="a", text_2="b"))
    assert "3 labels, so it gives no score" in error["message"]


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.tasks])
def test_every_example_works_and_answers_have_their_shape(name, embedder, ranker, classifier):
    route, path = ROUTES[name], name.partition(" ")[2]
    servers = [("embed", embedder), ("classify", ranker)]
    if path.endswith("classify"):
        servers.append(("classify", classifier))
    document = httpx.get(f"{embedder[2]}/openapi.json").json()
    reference = f"#/components/schemas/{route.answer.__name__}"
    schema = {"$ref": reference, "components": document["components"]}
    for task, (_, _, url) in servers:
        answer = post(url, path, **route.example)
        if task in route.tasks:
            assert answer.status_code == 200, answer.text
            jsonschema.validate(answer.json(), schema)
        else:
            error_of(answer)


def test_lines_of_a_batch_file_may_be_texts(embedder, tmp_path):
    lines = [
        ("e", "/v1/embeddings", {"input": TEXTS}),
        ("s", "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        ("r", "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}),
    ]
    entries = [{"custom_id": i, "method": "POST", "url": u, "body": b} for i, u, b in lines]
    (tmp_path / "in").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = [f"input={tmp_path / 'in'}", f"output={tmp_path / 'out'}", f"url={embedder[2]}"]
    assert cli.main(["run-batch", "-q", *words]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    bodies = {a["custom_id"]: a["response"]["body"] for a in answers}
    assert len(bodies["e"]["data"]) == len(bodies["s"]["data"]) == len(bodies["r"]["results"]) == 3
    assert bodies["r"]["results"][0]["index"] == 0


def test_a_model_that_generates_refuses_the_pooling_routes(tiny_server):
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a"})):
        error = error_of(post(tiny_server, path, **body))
        assert "it generates: use /v1/chat/completions" in error["message"]


# ---- offline ----


@pytest.mark.parametrize("process", ["inline", "process"])
def test_the_offline_api_embeds_scores_and_classifies(process, embedder, ranker, classifier):
    options = {"opt": "O0", "threads": 1, "num_blocks": 300, "process": process}
    path, model, _ = embedder
    llm = LLM(str(path), **options)
    for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
        found = np.array(output.embedding, np.float32)
        assert difference(found, expected_embedding(path, model, text)) < 2e-5
    assert len(llm.embed(TEXTS[0], dimensions=16)[0].embedding) == 16
    assert llm.score(TEXTS[0], TEXTS[0])[0].score == pytest.approx(1, abs=1e-5)
    with pytest.raises(RequestError, match="does not generate; it embeds"):
        llm.generate("a")
    llm.close()
    if process == "process":
        return
    path, model, _ = ranker
    (found,) = LLM(str(path), **options).score(TEXTS[0], TEXTS[1])
    assert found.score == pytest.approx(expected_score(path, model, *TEXTS[:2]), abs=1e-5)
    path, model, _ = classifier
    llm = LLM(str(path), **options)
    expected = label_values(model, load_tokenizer(path).encode(TEXTS[0])).softmax(-1)
    assert llm.classify(TEXTS[0])[0].probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_pairs_match_one_against_many_or_as_many():
    names = ("a", "b")
    assert match_pairs("x", ["y", "z"], names) == [("x", "y"), ("x", "z")]
    assert match_pairs(["x", "y"], ["y", "z"], names) == [("x", "y"), ("y", "z")]
    with pytest.raises(RequestError, match="a has 2 texts and b 1"):
        match_pairs(["x", "y"], "z", names)


def test_a_limit_above_what_the_model_takes_is_that():
    assert TextOptions(truncate=500, params=PoolingParams()).limit(160) == 160
    assert TextOptions().limit(160) is None
