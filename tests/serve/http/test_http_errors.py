"""What a client that asks for the impossible is told."""

import threading
import time

import httpx
import pytest
from support_serving import MODEL, RunningServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}

BAD_BODIES = [
    # (route, body, param, words of the message)
    ("completions", {**TEXT, "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ("completions", {**TEXT, "max_tokens": -3}, "max_tokens", "-3"),
    ("chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "is 0"),
    ("completions", {**TEXT, "temperature": -1}, "temperature", "-1"),
    ("completions", {**TEXT, "top_p": 0}, "top_p", "(0, 1]"),
    ("completions", {**TEXT, "top_k": -5}, "top_k", "-5"),
    ("completions", {**TEXT, "stop": ""}, "stop", "non-empty"),
    ("completions", {**TEXT, "stop": ["a", ""]}, "stop", "non-empty"),
    ("completions", {**TEXT, "stop": ["a"] * 17}, "stop", "at most 16"),
    ("completions", {**TEXT, "n": 0}, "n", "n is 0"),
    (
        "completions",
        {"prompt": [1, 2, 2**70]},
        "prompt",
        "prompt.2: Input should be less than or equal to 9223372036854775807 (got 1180591620717411",
    ),
    (
        "completions",
        {"prompt": ["a", [1]]},
        "prompt",
        "prompt.1: Input should be a valid string (got [1])",
    ),
    ("completions", {"prompt": [[1], [2, "a"]]}, "prompt", "prompt.1.1: Input should be a valid i"),
    (
        "completions",
        {"prompt": 5},
        "prompt",
        "prompt: A text, token ids, or a list of either. (got 5)",
    ),
    ("completions", {**TEXT, "stop": {"a": 1}}, "stop", "stop: Strings that end the output. (got "),
    ("completions", {**TEXT, "n": 129}, "n", "at most 128"),
    ("completions", {**TEXT, "logprobs": 21}, "logprobs", "0 to 20"),
    ("completions", {**TEXT, "logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ("completions", {**TEXT, "logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ("completions", {**TEXT, "allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ("completions", {**TEXT, "bad_words": [""]}, "bad_words", "empty"),
    ("completions", {**TEXT, "priority": 3}, "priority", "fcfs"),
    ("completions", {**TEXT, "suffix": "x"}, "suffix", "fill-in-the-middle"),
    ("completions", {**TEXT, "best_of": 4}, "best_of", "rank"),
    ("completions", {**TEXT, "min_tokens": 99}, "min_tokens", "max_tokens"),
    (
        "completions",
        {**TEXT, "stream_options": {"include_usage": True}},
        "stream_options",
        "stream",
    ),
    ("completions", {**TEXT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    *(
        (
            route,
            {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "include_usage is not; set include_usage",
        )
        for route, body in (("completions", TEXT), ("chat/completions", CHAT))
    ),
    (
        "completions",
        {**TEXT, "response_format": {"type": "yaml"}},
        "response_format",
        "text",
    ),
    ("completions", {**TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ("completions", {**TEXT, "temperature": "hot"}, "temperature", "number"),
    ("completions", {}, "prompt", "missing"),
    ("completions", {"prompt": []}, "prompt", "missing"),
    ("completions", {"prompt": ""}, "prompt", "empty"),
    ("completions", {"prompt": [[]]}, "prompt", "empty"),
    ("completions", {"prompt": [1, 99999]}, "prompt", "99999"),
    ("completions", {"prompt": [-1]}, "prompt", "-1"),
    ("completions", {"prompt": {"a": 1}}, "prompt", "prompt"),
    ("completions", {"prompt": ["a"] * 1025}, "prompt", "1024"),
    ("completions", {"prompt": ["a"] * 1000, "n": 100}, "n", "100000 choices"),
    ("completions", {"prompt": [5] * 256}, "prompt", "256 tokens"),
    ("completions", {"prompt": [5] * 300, "max_tokens": 9}, "prompt", "max_tokens is 9"),
    ("chat/completions", {}, "messages", "missing"),
    ("chat/completions", {"messages": []}, "messages", "empty"),
    ("chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages", "role"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    ("chat/completions", {**CHAT, "tools": [{}]}, "tools", "function"),
    (
        "chat/completions",
        {**CHAT, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "both true",
    ),
]


@pytest.mark.parametrize(("route", "body", "param", "words"), BAD_BODIES)
def test_bad_bodies(shared_server, route, body, param, words):
    answer = shared_server.post(f"/v1/{route}", model=MODEL, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"] in (None, "context_length_exceeded")
    assert (error["code"] is None) == ("leaves no room" not in error["message"])


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"prompt": "\xff"}', b"null"])
def test_bodies_that_are_not_json_objects(shared_server, raw):
    for route in ("completions", "chat/completions"):
        answer = httpx.post(f"{shared_server.url}/v1/{route}", content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_lone_surrogates_in_a_prompt(shared_server):
    raw = b'{"prompt": "\\ud800"}'
    answer = httpx.post(f"{shared_server.url}/v1/completions", content=raw)
    assert answer.status_code == 400


def test_unknown_model_and_route(shared_server):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        body = {**TEXT, **CHAT} if path != "/tokenize" else TEXT
        answer = shared_server.post(path, model="other/model", **body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("not_found_error", "model_not_found")
        assert MODEL in error["message"]
    assert shared_server.get("/v1/models/other/model").status_code == 404
    error = shared_server.get("/v1/nothing").json()["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "unknown_url")
    answer = shared_server.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "GET /v1/completions is not allowed; use POST"
    assert answer.json()["error"]["code"] == "method_not_supported"


def test_the_server_still_answers_after_all_this(shared_server):
    assert shared_server.post("/v1/completions", **TEXT).status_code == 200
    shared_server.wait_idle()


def test_keys_guard_all_but_the_probes(new_server):
    server = new_server(serve={"api_keys": ("first", "second", "schlüssel 三")})
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
        answer = server.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert server.get("/nothing").status_code == 401
    for headers in (
        {"authorization": "Bearer second"},
        {"x-api-key": "first"},
        {"authorization": "Bearer schlüssel 三".encode()},
    ):
        assert server.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/ping", "/load", "/version"):
        assert server.get(path).status_code == 200


def test_bodies_over_the_limit(new_server):
    server = new_server(serve={"max_body_bytes": 2000})
    assert server.post("/v1/completions", prompt="x" * 100, max_tokens=1).status_code == 200
    answer = server.post("/v1/completions", prompt="x" * 3000)
    assert answer.status_code == 413
    assert "2000" in answer.json()["error"]["message"]

    def in_pieces():
        for _ in range(100):
            yield b" " * 100

    answer = httpx.post(f"{server.url}/v1/completions", content=in_pieces())
    assert answer.status_code == 413


def test_a_body_that_never_ends_is_a_408(new_server):
    server = new_server(serve={"body_seconds": 0.3})

    def slowly():
        yield b'{"prompt": "a"'
        time.sleep(1.5)
        yield b"}"

    answer = httpx.post(f"{server.url}/v1/completions", content=slowly())
    assert answer.status_code == 408
    assert "0.3 s" in answer.json()["error"]["message"]


def test_request_ids_come_back(shared_server):
    def ask(headers, **body):
        url = f"{shared_server.url}/v1/completions"
        return httpx.post(url, headers=headers, json={**TEXT, "max_tokens": 1, **body})

    named = ask({"x-request-id": "abc-1"}, request_id="other")
    assert (named.headers["x-request-id"], named.json()["id"]) == ("abc-1", "cmpl-abc-1")
    named = ask({}, request_id="mine")
    assert (named.headers["x-request-id"], named.json()["id"]) == ("mine", "cmpl-mine")
    assert shared_server.get("/v1/nothing").headers["x-request-id"]
    for bad in ("x" * 300, "a\nb", "ü"):
        answer = ask({}, request_id=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "a/b", ""])
def test_only_json_is_read(shared_server, kind):
    url = f"{shared_server.url}/v1/completions"
    answer = httpx.post(url, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def said(text):
    return {"messages": [{"role": "user", "content": text}]}


WITH_TEXT = [
    ("/v1/chat/completions", "messages", said),
    ("/v1/messages", "messages", lambda text: {**said(text), "max_tokens": 1}),
    ("/v1/responses", "input", lambda text: {"input": text}),
    ("/v1/completions", "prompt", lambda text: {"prompt": text}),
]
COUNTING = [
    ("/v1/messages/count_tokens", "messages", said),
    ("/tokenize", "messages", said),
    ("/tokenize", "prompt", lambda text: {"prompt": text}),
]


@pytest.mark.parametrize(("path", "param", "as_body"), [*WITH_TEXT, *COUNTING])
def test_the_field_that_is_too_long_is_named(shared_server, path, param, as_body):
    long, endless = "word " * 256, "word " * 100_000  # the second is not even tokenized
    for text in (endless,) if (path, param, as_body) in COUNTING else (long, endless):
        answer = shared_server.post(path, **as_body(text))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(("path", "param", "as_body"), WITH_TEXT)
def test_the_field_that_the_cache_can_never_hold_is_named(small_cache, path, param, as_body):
    error = small_cache.post(path, **as_body("word " * 40)).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "the KV cache" in error["message"]


def test_ids_that_the_cache_can_never_hold_are_named(small_cache):
    error = small_cache.post("/inference/v1/generate", token_ids=[5] * 200).json()["error"]
    assert (error["param"], error["code"]) == ("token_ids", "context_length_exceeded")


@pytest.fixture(scope="module")
def small_cache():
    with RunningServer(num_blocks=8) as server:  # 112 tokens; the model takes 256
        yield server


@pytest.mark.parametrize(("path", "param", "as_body"), WITH_TEXT)
def test_temperatures_are_those_of_the_api_whose_shape_a_route_has(
    shared_server, path, param, as_body
):
    most = 1 if path == "/v1/messages" else 2
    body = {**as_body("a"), "max_tokens": 2}
    for wrong in (most + 0.001, 2.5, -1):
        error = shared_server.post(path, **body, temperature=wrong).json()["error"]
        assert error["param"] == "temperature"
        assert f"temperature is {wrong}; it must be 0 (greedy) to {most}," in error["message"]
    for right in (0, most, None):
        assert shared_server.post(path, **body, temperature=right).status_code == 200
    free = {"token_ids": [1, 2], "sampling_params": {"temperature": 2.5, "max_tokens": 2}}
    assert shared_server.post("/inference/v1/generate", **free).status_code == 200


def test_a_full_queue_is_a_429(new_server):
    server = new_server(max_num_seqs=1, max_num_waiting=1, step_seconds=0.05)
    answers = []

    def ask():
        answers.append(server.post("/v1/completions", prompt="a", max_tokens=10))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert codes[-1] == 429
    refused = next(answer for answer in answers if answer.status_code == 429)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert refused.headers["retry-after"]
