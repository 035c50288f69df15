"""Bodies made to break a server: each gets a clear 4xx (or its answer), never a 5xx or a hang."""

import contextlib
import json
import logging
import socket
import time

import httpx
import pytest

CLIENT = httpx.Client(timeout=20)  # one for all: making one takes longer than a request
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BASES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
}
GENERATING = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module", autouse=True)
def _closed_client():
    yield
    CLIENT.close()


def send(server, path, raw, **headers):
    if isinstance(raw, str):
        raw = raw.encode()
    headers = {"content-type": "application/json", **headers}
    return CLIENT.post(server.url + path, content=raw, headers=headers)


def refused(answer, status=400):
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 2000
    return error


def with_field(base, name, text):
    """JSON text of `base` with one more field, whose value is spelled out."""
    return json.dumps(base)[:-1] + f', "{name}": {text}}}'


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x", "NaN", "NaN"),
        ("x", "[Infinity]", "Infinity"),
        ("x", '{"y": -Infinity}', "-Infinity"),
        ("x", '{"y": 1, "y": 2}', "twice"),
        ("x", "[" * 10_000 + "]" * 10_000, "deep"),
        ("x", '{"a":' * 10_000 + "1" + "}" * 10_000, "deep"),
        ("x", "[" * 10_000, "deep"),
        ("x", "1" * 10_000, "JSON"),
        ("x", '"\\ud800"', "JSON"),
        ("\\ud800", "1", "JSON"),
        ("x", '"\t"', "JSON"),
        ("x", "01", "JSON"),
        ("x", "'a'", "JSON"),
        ("model", '"\\u0000"', None),
        ("model", '"' + "m" * 100_000 + '"', None),
    ],
)
def test_what_json_cannot_mean(shared_server, path, name, text, words):
    answer = send(shared_server, path, with_field(BASES[path], name, text))
    if words is None:
        assert answer.status_code == 404
        assert len(answer.text) < 2000
    else:
        assert words in refused(answer)["message"]


@pytest.mark.parametrize("path", BASES)
def test_fields_given_twice(shared_server, path):
    body = json.dumps(BASES[path])
    error = refused(send(shared_server, path, body[:-1] + ", " + body[1:]))
    assert "twice" in error["message"]


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("raw", [b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}\x00", b"\x80", b"{}{}"])
def test_bytes_that_are_not_json(shared_server, path, raw):
    refused(send(shared_server, path, raw))


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**9),
        ("n", 10**30),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 10**18),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", [1]),
        ("top_p", -1),
        ("top_p", 1.0001),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", -1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("seed", 2**70),
        ("seed", "x"),
        ("stop", ["x"] * 200),
        ("stop", [1]),
        ("stop", {}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [10**30]),
        ("allowed_token_ids", [10**6]),
        ("allowed_token_ids", []),
        ("logit_bias", {str(index): 1 for index in range(100_000)}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5.5": 1}),
        ("logit_bias", {"\u0665": 1, "5": 1}),
        ("bad_words", [""]),
        ("bad_words", ["x y"] * 10_000),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 10**6),
        ("truncate_prompt_tokens", -5),
        ("cache_salt", ""),
        ("cache_salt", "x" * 129),
        ("priority", 1),
        ("request_id", "x" * 257),
        ("request_id", "a\r\nb: c"),
        ("stream_interval", 0),
        ("stream_options", {"include_usage": "yes"}),
        ("stream_options", {"include_usage": True}),
        ("stream", "true"),
        ("model", 3),
    ],
)
def test_values_without_sense(shared_server, path, name, value):
    error = refused(send(shared_server, path, json.dumps({**BASES[path], name: value})))
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 10**18),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("stop", ["\x00", "\u202e", "x" * 100_000]),
        ("temperature", 2),
        ("temperature", 5e-324),
        ("repetition_penalty", 1e300),
        ("n", 2.0),
        ("prompt", "\x00\ufffe\U0010ffff"),
    ],
)
def test_values_that_are_odd_but_allowed(shared_server, name, value):
    body = {**BASES["/v1/completions"], name: value}
    assert send(shared_server, "/v1/completions", json.dumps(body)).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
def test_ten_megabytes(shared_server, path):
    text = "word " * 2_000_000
    bodies = ({"prompt": text, "max_tokens": 1}, {"prompt": "x", "stop": ["x"] * 2_000_000})
    for body in bodies:
        if path.endswith("chat/completions"):
            content = body.pop("prompt")
            body = {"messages": [{"role": "user", "content": content}], **body}
        refused(send(shared_server, path, json.dumps(body)))
    assert shared_server.get("/health").status_code == 200


def test_seventeen_megabytes_are_too_many(shared_server):
    raw = b'{"prompt": "' + b"x" * 17_000_000 + b'"}'
    refused(send(shared_server, "/v1/completions", raw), 413)


@pytest.mark.parametrize(
    "messages",
    [
        [{}],
        [{"role": None, "content": "x"}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [[]]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
    ],
)
def test_messages_without_sense(shared_server, messages):
    body = json.dumps({"messages": messages, "max_tokens": 1})
    assert refused(send(shared_server, "/v1/chat/completions", body))["param"] == "messages"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"special_tokens": []}),
        ("documents", [{"text": "x"}]),
        ("echo", True),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
        ("modalities", ["audio"]),
        ("functions", [{"name": "f"}]),
        ("top_logprobs", 5),
    ],
)
def test_chat_fields_that_cannot_take_effect(shared_server, name, value):
    body = json.dumps({**CHAT, name: value})
    assert refused(send(shared_server, "/v1/chat/completions", body))["param"] == name


def test_a_trusted_server_takes_templates_and_survives_bad_ones(new_server):
    server = new_server(serve={"trust_request_chat_template": True})

    def ask(template):
        body = json.dumps({"messages": CHAT["messages"], "chat_template": template})
        return send(server, "/tokenize", body)

    assert ask("{{ messages[0].content }}").json()["tokens"] == server.tokenizer.encode("hi")
    for template in (
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' % 1 }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ):
        assert refused(ask(template))["param"] == "messages"


def test_requests_in_one_packet_are_answered_in_order(shared_server):
    host, port = shared_server.url.removeprefix("http://").split(":")
    bodies = [json.dumps({"prompt": "a", "max_tokens": 1}), "{", json.dumps({"prompt": ""})]
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    packet = "".join(f"{head}content-length: {len(body)}\r\n\r\n{body}" for body in bodies)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(packet.encode())
        received = b""
        while received.count(b"HTTP/1.1 ") < 3 or not received.endswith(b"}"):
            received += connection.recv(65536)
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"400", b"400"]


def test_a_client_that_leaves_within_its_body_is_no_error(new_server, caplog):
    server = new_server()
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for length in (0, 5):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall((head + "content-length: 20\r\n\r\n" + "{" * length).encode())
            time.sleep(0.1)
    assert server.get("/health").status_code == 200
    time.sleep(0.2)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_nonsense_on_the_wire_ends_that_connection_only(shared_server):
    host, port = shared_server.url.removeprefix("http://").split(":")
    for packet in (b"\x16\x03\x01\x02\x00\x01", b"GET /\x00 HTTP/1.1\r\n\r\n", b"X" * 70_000):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(packet)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert b" 500 " not in connection.recv(65536)
    assert shared_server.get("/health").status_code == 200


def wire(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_to_end(connection):
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(
    "opening",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: ",
        b"GET /",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["header", "path", "trailer", "chunk extension"],
)
def test_a_head_without_end_is_cut(shared_server, opening):
    with wire(shared_server) as connection:
        connection.sendall(opening)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                sent += connection.send(b"a" * 65536)
        assert sent < 20_000_000  # what the kernel's buffers take
        answer = read_to_end(connection)
    assert answer == b"" or b" 431 " in answer  # a reset may come before the answer
    assert shared_server.get("/health").status_code == 200


def test_many_headers_are_cut_and_said_so(shared_server):
    with wire(shared_server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 14_000)
        time.sleep(0.2)
        answer = read_to_end(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert "more than 65536 bytes" in json.loads(body)["error"]["message"]


def test_who_sends_no_head_is_left(new_server):
    server = new_server(serve={"body_seconds": 0.3})
    with wire(server) as silent, wire(server) as slow, wire(server) as between:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: ")
        between.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in between.recv(65536)
        assert read_to_end(silent) == b""
        answer = read_to_end(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert "0.3 s" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        time.sleep(0.2)  # longer than a head may take: this one waits for its next request
        between.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in between.recv(65536)


def test_a_body_is_no_head(shared_server):
    text = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 500_000}).encode()
    chunks = [text[i : i + 40_000] for i in range(0, len(text), 40_000)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    with wire(shared_server) as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        for chunk in chunks:
            connection.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_of_nonsense_is_refused(shared_server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with wire(shared_server) as connection:
        connection.sendall(head + b"zz\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("behind", [b"no http", b"GET / HTTP/1.1\r\nx: " + b"a" * 3_000_000])
def test_a_whole_request_is_answered_whatever_is_behind_it(new_server, behind):
    server = new_server(step_seconds=0.02)
    body = json.dumps({"prompt": "a", "max_tokens": 10}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with wire(server) as connection:
        connection.sendall(head.encode() + body)
        with contextlib.suppress(ConnectionError):
            connection.sendall(behind)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 10


def test_what_is_no_http_is_refused_in_the_one_shape(shared_server):
    with wire(shared_server) as connection:
        connection.sendall(b"no http\r\n\r\n")
        answer = read_to_end(connection)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_the_server_still_answers_after_all_this(shared_server):
    answer = send(shared_server, "/v1/completions", json.dumps(BASES["/v1/completions"]))
    assert answer.status_code == 200
    shared_server.wait_idle()
