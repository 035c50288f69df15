"""Routes that make vectors, over a fake embedder: conversations, full queues, sleep, drain, aborts.

The fake vector of a text is the sum of its token ids and their number.
"""

import json
import socket
import threading

import httpx
import pytest
from support_fake_runner import FakeRunner
from support_serving import RunningServer

TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
LONG = [[7] * 200] * 8


def others(texts):
    return [f"b {n}" for n in range(len(texts))]


ROUTES = [
    ("/v1/embeddings", lambda texts: {"input": texts}),
    ("/pooling", lambda texts: {"input": texts}),
    ("/v1/score", lambda texts: {"text_1": "a", "text_2": others(texts)}),
    (
        "/v1/rerank",
        lambda texts: {"query": "a", "documents": others(texts)},
    ),
]


class Sleeper(FakeRunner):
    """A fake runner with memory to give up."""

    def sleep(self, level):
        """Nothing to do."""

    def wake(self):
        """Nothing to do."""

    def reload_weights(self, path):
        """Nothing to do."""


@pytest.fixture(scope="module")
def embedder():
    runner = Sleeper(16, 421)
    serve = {"admin_key": "root", "trust_request_chat_template": True}
    with RunningServer(embeds=True, runner=runner, serve=serve, max_num_waiting=4) as server:
        yield server


def vector(ids):
    return [float(sum(ids)), float(len(ids))]


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def operate(server, verb):
    headers = {"authorization": "Bearer root"}
    return httpx.post(f"{server.url}/admin/{verb}", headers=headers, json={}, timeout=20)


# ---- conversations ----


@pytest.mark.parametrize("route", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("fields", "opens"),
    [({}, False), ({"add_generation_prompt": True}, True), ({"add_special_tokens": True}, False)],
)
def test_a_conversation_is_read_through_the_template(embedder, route, fields, opens):
    tokenizer = embedder.tokenizer
    text = tokenizer.render_chat(TALK, add_generation_prompt=opens)
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = embedder.post(route, messages=TALK, **fields)
    assert answer.status_code == 200, answer.text
    [item] = answer.json()["data"]
    assert item.get("embedding", item.get("data")) == vector(ids)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def test_settings_of_the_template_are_obeyed(embedder):
    encode = embedder.tokenizer.encode
    fields = {
        "messages": TALK,
        "chat_template": "{{ task }}: {{ messages[0].content }}",
        "chat_template_kwargs": {"task": "find"},
    }
    answer = embedder.post("/v1/embeddings", **fields).json()
    assert answer["data"][0]["embedding"] == vector(encode("find: one two"))
    cut = embedder.post("/v1/embeddings", messages=TALK, truncate_prompt_tokens=3).json()
    assert cut["usage"]["prompt_tokens"] == 3
    continued = embedder.post("/v1/embeddings", messages=TALK, continue_final_message=True).json()
    assert continued["usage"]["prompt_tokens"] < len(encode(embedder.tokenizer.render_chat(TALK)))


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"messages": []}, "messages", "empty"),
    ({"messages": TALK, "input": "a"}, "messages", "both given"),
    ({"input": "a", "chat_template": "x"}, "chat_template", "for messages"),
    ({"input": "a", "tools": [{}]}, "tools", "for messages"),
    ({"messages": [{"role": "bard", "content": "a"}]}, "messages", "bard"),
    ({"messages": [{"role": "user", "content": "a " * 400}]}, "messages", "at most 256"),
    ({"messages": TALK, "chat_template": "{{ '' }}"}, "messages", "empty"),
    ({"messages": TALK, "chat_template": ""}, "chat_template", "Jinja template"),
    ({"messages": TALK, "documents": [{}]}, "documents", "does not use it"),
    ({}, "input", "or messages"),
])  # fmt: skip
def test_what_no_conversation_can_be_made_of_is_a_400(embedder, fields, param, words):
    error = error_of(embedder.post("/v1/embeddings", **fields))
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/embeddings", {"input": "a " * 400}, "input"),
    ("/v1/score", {"queries": "a", "documents": ["b", "a " * 400]}, "documents"),
    ("/v1/score", {"text_1": "a " * 50_000, "text_2": "b"}, "text_1"),
    ("/v1/rerank", {"query": "a", "documents": ["a " * 50_000]}, "documents"),
    ("/v1/rerank", {"query": "a " * 50_000, "documents": ["b"]}, "query"),
])  # fmt: skip
def test_the_field_with_a_text_that_is_too_long_is_named(embedder, path, fields, param):
    error = error_of(embedder.post(path, **fields))
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_pooling_is_for_the_task_of_the_model(embedder):
    assert embedder.post("/pooling", input="a", task="embed").status_code == 200
    error = error_of(embedder.post("/pooling", input="a", task="classify"))
    assert error["param"] == "task"
    assert "the model's is 'embed'" in error["message"]


# ---- states of the server ----


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_full_queue_is_a_429_and_takes_no_part_of_a_request(embedder, path, body):
    refused = embedder.post(path, **body(LONG))
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused.headers["retry-after"]
    embedder.wait_idle()
    assert embedder.post(path, **body(LONG[:1])).status_code == 200


def test_a_sleeping_engine_refuses_texts_and_takes_them_awake(embedder):
    slept = operate(embedder, "sleep")
    assert slept.status_code == 200, slept.text
    for path, body in ROUTES:
        assert error_of(embedder.post(path, **body(LONG[:1])), 503)["code"] == "unavailable"
    assert operate(embedder, "wake").status_code == 200
    assert embedder.post("/v1/embeddings", input="a").status_code == 200


def test_a_pause_holds_texts(embedder):
    operate(embedder, "pause")
    answers = []
    ask = threading.Thread(
        target=lambda: answers.append(embedder.post("/v1/embeddings", input="a"))
    )
    ask.start()
    embedder.wait_for(lambda: embedder.core.scheduler.requests)
    assert not answers
    operate(embedder, "resume")
    ask.join()
    assert answers[0].status_code == 200


def test_a_client_that_leaves_frees_its_texts(new_server):
    server = new_server(embeds=True, step_seconds=0.02, max_num_batched_tokens=16)
    body = json.dumps({"input": [[5 + n] * 150 for n in range(50)]}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.server.port)) as client:
        client.sendall(head.encode() + body)
        server.wait_for(lambda: len(server.core.scheduler.requests) == 50)
    server.wait_idle()
    finished = server.core.stats().finished
    assert finished["abort"] > 40
    assert finished.get("stop", 0) + finished["abort"] == 50


def test_a_named_request_is_aborted_by_the_operator(new_server):
    serve = {"admin_key": "root"}
    server = new_server(embeds=True, serve=serve, step_seconds=0.02, max_num_batched_tokens=16)
    answers = []
    body = {"input": LONG, "request_id": "mine"}
    ask = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", **body)))
    ask.start()
    server.wait_for(lambda: len(server.core.scheduler.requests) == len(LONG))
    headers = {"authorization": "Bearer root"}
    url = f"{server.url}/admin/abort"
    httpx.post(url, headers=headers, json={"request_id": "mine"}).raise_for_status()
    ask.join()
    assert "aborted" in error_of(answers[0], 503)["message"]


def test_a_drain_lets_texts_finish_and_refuses_others(new_server):
    server = new_server(embeds=True, serve={"drain_seconds": 20.0, "admin_key": "root"})
    operate(server, "pause")
    answers = []
    ask = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", input=LONG)))
    ask.start()
    server.wait_for(lambda: server.core.scheduler.requests)
    server.server.stop()
    server.wait_for(lambda: server.get("/ready").json()["status"] == "draining")
    error = error_of(server.post("/v1/embeddings", input="a"), 503)
    assert error["code"] == "draining"
    operate(server, "resume")
    ask.join()
    assert answers[0].status_code == 200
    assert len(answers[0].json()["data"]) == len(LONG)


def test_a_failed_step_fails_its_texts_only(new_server):
    server = new_server(embeds=True, fail_at={0: ValueError("broken")})
    assert error_of(server.post("/v1/embeddings", input="a"), 500)["code"] == "generation_failed"
    assert server.post("/v1/embeddings", input="a").status_code == 200
