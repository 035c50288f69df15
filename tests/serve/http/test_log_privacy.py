"""What users write, and keys, stay out of the logs; the request's id is in every line about it."""

import io
import json
import logging

import httpx
import pytest

from girih.serve.logs import JsonFormatter

SECRET, KEY, ADMIN = "xyzzy-prompt", "sk-user-key", "root-admin-key"


@pytest.fixture
def logged(new_server):
    """A server, and a function that returns what it logged so far, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("girih")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    fail_at = {12: ValueError("a step failed")}
    serve = {"api_keys": (KEY,), "admin_key": ADMIN}
    yield (
        new_server(serve=serve, fail_at=fail_at),
        lambda: [json.loads(line) for line in stream.getvalue().splitlines()],
    )
    logger.removeHandler(handler)
    logger.setLevel(before)


def ask(server, path, body, name, key=KEY):
    headers = {"authorization": f"Bearer {key}", "x-request-id": name}
    return httpx.post(server.url + path, headers=headers, json=body, timeout=30)


def bodies():
    messages = [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]
    rest = {"max_tokens": 3, "ignore_eos": True}
    return [
        ("/v1/completions", {"prompt": SECRET, **rest}),
        ("/v1/completions", {"prompt": SECRET, **rest, "stop": [SECRET]}),
        ("/v1/completions", {"prompt": SECRET, **rest, "echo": True, "suffix": SECRET}),
        ("/v1/completions", {"prompt": SECRET, **rest, "unknown_field": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/completions", {"prompt": SECRET * 200, **rest}),
        ("/v1/chat/completions", {"messages": messages, **rest}),
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 3}),
        ("/v1/messages", {"messages": messages[1:], "system": SECRET, "max_tokens": 3}),
        ("/tokenize", {"prompt": SECRET}),
    ]


def test_prompts_and_keys_are_not_logged(logged):
    server, lines = logged
    statuses = [
        ask(server, path, body, f"request-{number}").status_code
        for number, (path, body) in enumerate(bodies())
    ]
    for key in ("wrong-" + KEY, ADMIN):
        statuses.append(ask(server, "/v1/completions", {"prompt": SECRET}, "bad", key).status_code)
    httpx.post(f"{server.url}/admin/abort", headers={"authorization": f"Bearer {ADMIN}"}, json={})
    assert {200, 400, 401} <= set(statuses)
    assert any(status >= 500 for status in statuses)  # the failed step is logged too
    text = json.dumps(lines())
    assert "a step failed" in text
    for word in (SECRET, KEY, ADMIN):
        assert word not in text


def test_lines_name_their_request(logged):
    server, lines = logged
    for number, (path, body) in enumerate(bodies()):
        answer = ask(server, path, body, f"request-{number}")
        assert answer.headers["x-request-id"] == f"request-{number}"
    access = [line for line in lines() if line["logger"] == "girih.access"]
    assert [line["request_id"] for line in access] == [f"request-{n}" for n in range(len(access))]
    assert len(access) == len(bodies())
