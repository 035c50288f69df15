"""`girih run-batch`: order, errors per line, resuming, and an engine of its own."""

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import support_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from support_serving import RunningServer, fake_engine

from girih.kernels.base.errors import ConfigError, EngineError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import LocalTransport
from girih.serve.cli import main as cli
from girih.serve.config import SamplingConfig
from girih.serve.http.local_server import LocalServer
from girih.serve.offline import batch_lines, batch_run
from girih.serve.offline.batch_lines import ROUTE, BatchOutput, read_lines
from girih.serve.offline.batch_run import BatchRun


def request(name, prompt="Hello", **body):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    class Files:
        input = tmp_path / "in.jsonl"
        output = tmp_path / "out.jsonl"

        def write(self, *entries):
            lines = [e if isinstance(e, str) else json.dumps(e) for e in entries]
            self.input.write_text("\n".join(lines) + "\n")

        def answers(self):
            return [json.loads(line) for line in self.output.read_text().splitlines()]

        def run(self, url, *words):
            words = [f"input={self.input}", f"output={self.output}", f"url={url}", *words]
            return cli.main(["run-batch", "-q", *words])

    return Files()


def test_answers_come_in_the_order_of_the_lines(files, shared_server, capsys):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    entries = [request(f"r{i}", f"prompt {i}", max_tokens=1 + i % 7) for i in range(20)]
    entries.append({"custom_id": "chat", "url": "/v1/chat/completions", "body": chat})
    files.write(*entries)
    assert files.run(shared_server.url + "/v1", "concurrency=3") == 0
    answers = files.answers()
    assert [a["custom_id"] for a in answers] == [e["custom_id"] for e in entries]
    assert all(a["error"] is None and a["response"]["status_code"] == 200 for a in answers)
    assert len({a["id"] for a in answers}) == 21
    lengths = [a["response"]["body"]["usage"]["completion_tokens"] for a in answers[:20]]
    assert lengths == [1 + i % 7 for i in range(20)]
    assert answers[-1]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    alone = shared_server.post("/v1/completions", **entries[4]["body"]).json()
    assert answers[4]["response"]["body"]["choices"] == alone["choices"]
    assert capsys.readouterr().err == "21 answered, 0 refused, 0 unusable\n"


def test_a_wrong_line_has_its_own_error(files, shared_server, capsys):
    files.write(
        request("a"),
        "{",
        "",
        "[1]",
        request("a"),
        request("b", max_tokens=-1),
        request("c", stream=True),
        {**request("d"), "method": "GET"},
        {**request("e"), "url": "http://elsewhere/"},
        {**request("f"), "body": 3},
        {**request("g"), "url": "/v1/nowhere"},
        {**request("h"), "custom_id": 5},
        request("i"),
    )
    assert files.run(shared_server.url) == 0
    answers = files.answers()
    assert [a["custom_id"] for a in answers] == [
        "a", None, None, "a", "b", "c", "d", "e", "f", "g", None, "i",
    ]  # fmt: skip
    errors = [a["error"] and a["error"]["message"] for a in answers]
    assert "line 2: the line is not JSON" in errors[1]
    assert "line 5: custom_id is that of line 1" in errors[3]
    assert "stream" in errors[5]
    assert [a["response"] and a["response"]["status_code"] for a in answers] == [
        200, None, None, None, 400, None, None, None, None, 404, None, 200,
    ]  # fmt: skip
    assert "max_tokens" in answers[4]["response"]["body"]["error"]["message"]
    assert "2 answered, 2 refused, 8 unusable" in capsys.readouterr().err


def with_body(text):
    """A line of raw text whose name can be read."""
    return (
        b'{"custom_id":"x","url":"/v1/completions","body":{"prompt":"a","max_tokens":1,%b}}' % text
    )


def with_url(url):
    return json.dumps({**request("x"), "url": url}).encode()


DEEP = b"[" * 500 + b"]" * 500
WRONG_LINES = {
    "half a character in the prompt": (json.dumps(request("x", "x\ud83d")).encode(), r"'\\ud83d'"),
    "half a character in the name": (json.dumps(request("x\udc00")).encode(), r"'\\udc00'"),
    "bytes that are not UTF-8": (with_body(b'"user":"\xff"'), r"byte \d+ is 0xff"),
    "a surrogate's bytes": (with_body(b'"user":"\xed\xa0\xbd"'), r"byte \d+ is 0xed"),
    "UTF-16": (json.dumps(request("x")).encode("utf-16"), "not UTF-8|not JSON"),
    "a hole in the file": (b"\0" * 5000, "not JSON"),
    "a raw zero byte in a text": (with_body(b'"user":"\0"'), "not JSON"),
    "NaN": (with_body(b'"temperature":NaN'), "cannot be sent"),
    "a number beyond floats": (with_body(b'"temperature":1e999'), "cannot be sent"),
    "a number beyond 64 bits": (with_body(b'"seed":' + b"9" * 4000), "seed"),
    "a number of many digits": (with_body(b'"seed":' + b"9" * 9000), "too many digits"),
    "a field given twice": (with_body(b'"max_tokens":2'), "'max_tokens' is given twice"),
    "deep nesting": (with_body(b'"x":' + b"[" * 960 + b"]" * 960), "nested too deeply"),
    "deeper nesting": (b"[" * 100_000, "nested too deeply"),
    "a deep method": (b'{"custom_id":"x","method":%b}' % DEEP, "method is a list"),
    "a deep url": (b'{"custom_id":"x","url":%b}' % DEEP, "url is a list"),
    "a deep name": (b'{"custom_id":%b}' % DEEP, "custom_id is a list"),
    "a route with a control character": (with_url("/v1/\x07"), "must be a route"),
    "a route of two lines": (with_url("/v1 HTTP/1.1\r\nx: y"), "must be a route"),
    "an endless route": (with_url("/" + "a" * 70_000), "must be a route"),
    "a route with half a character": (with_url("/\ud83d"), "must be a route"),
    "another host": (with_url("//[::"), "must be a route"),
    "not an object": (b"3", "a number; it must be a JSON object"),
    "an object without a name": (b'{"":1}', "custom_id is null"),
    "an answer behind the request's end": (with_body(b'"background":true'), "background is true"),
    "more bytes than the server takes": (with_body(b'"user":"%b"' % (b"a" * 2_000_000)), "at most"),
    "two requests": (with_body(b'"n":1') + with_body(b'"n":1'), "not JSON"),
}


def test_no_content_of_a_line_ends_a_batch(files, new_server):
    server = new_server(serve={"max_body_bytes": 1_000_000})
    lines = [json.dumps(request("first")).encode()]
    for number, (line, _) in enumerate(WRONG_LINES.values()):
        named = line.replace(b'"custom_id":"x"', b'"custom_id":"x%d"' % number)
        named = named.replace(b'"custom_id": "x"', b'"custom_id": "x%d"' % number)
        lines += [named, json.dumps(request(f"good {number}")).encode()]
    files.input.write_bytes(b"\n".join(lines))
    assert files.run(server.url) == 0
    answers = files.answers()
    assert len(answers) == len(lines)
    for place, (name, (_, reason)) in enumerate(WRONG_LINES.items()):
        wrong, good = answers[1 + 2 * place : 3 + 2 * place]
        error = wrong["error"] or wrong["response"]["body"]["error"]
        assert re.search(reason, error["message"]), name
        assert good["custom_id"] == f"good {place}"
        assert good["response"]["status_code"] == 200, name
    assert answers[0]["response"]["status_code"] == 200
    whole = files.output.read_text().splitlines(keepends=True)
    files.output.write_text("".join(whole[:20]))
    assert files.run(server.url) == 0
    assert [a["custom_id"] for a in files.answers()] == [a["custom_id"] for a in answers]


def test_marks_line_ends_and_blank_lines_are_no_part_of_a_request(files, shared_server):
    mark = b"\xef\xbb\xbf"
    a, b, c = (json.dumps(request(name)).encode() for name in "abc")
    cut = json.dumps(request("d")).encode()[:-20]
    for text in (
        mark + a + b"\r\n\r\n" + b + b"\r\n \t\n" + mark + c + b"\r\n" + mark + b"\n" + cut,
        a + b"\n\n\n" + b + b"\n" + c + b"\n" + cut,
    ):
        files.input.write_bytes(text)
        files.output.unlink(missing_ok=True)
        assert files.run(shared_server.url) == 0
        answers = files.answers()
        assert [answer["custom_id"] for answer in answers] == ["a", "b", "c", None]
        assert [answer["error"] is None for answer in answers] == [True, True, True, False]


def test_a_line_that_is_too_long_is_not_read_as_a_whole(files, monkeypatch):
    monkeypatch.setattr(batch_lines, "MAX_LINE", 300)
    good = json.dumps(request("good")).encode()
    fits = b" " * (299 - len(good)) + good
    files.input.write_bytes(b"\n".join([b"x" * 1000, fits, b"x" * 301, b"x" * 602, good]))
    lines = list(read_lines(str(files.input)))
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert [line.problem is None for line in lines] == [False, True, False, False, False]
    assert "more than 300 bytes" in lines[0].problem
    assert "custom_id is that of line 2" in lines[4].problem


def answered_lines(files, reply, concurrency=2):
    """Run a batch against `reply`, a function of a request; returns the answers."""

    async def run():
        transport = httpx.MockTransport(reply)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            with BatchOutput(str(files.output)) as output:
                await BatchRun(client, output, concurrency).run(read_lines(str(files.input)))

    asyncio.run(run())
    return files.answers()


fragments = st.sampled_from(
    [
        *(b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"\r", b"\0", b"\xff", b"\xed\xa0\x80"),
        *(b"\\ud83d", b"1e400", b"NaN", b'"custom_id":', b'"url":', b'"/v1/x"', b'"body":{"n":'),
        *(b"\xef\xbb\xbf", b'"method":"POST"', "é\u2028".encode()),
    ]
)
some_line = st.lists(fragments, max_size=20).map(b"".join) | st.binary(max_size=40).map(
    lambda raw: raw.replace(b"\n", b"")
)


@given(wrong=st.lists(some_line, min_size=1, max_size=8))
@settings(deadline=None)
def test_any_bytes_between_two_requests_leave_these_alone(tmp_path_factory, wrong):
    class Files:
        input = tmp_path_factory.getbasetemp() / "any.jsonl"
        output = tmp_path_factory.getbasetemp() / "any-out.jsonl"

        @classmethod
        def answers(cls):
            return [json.loads(line) for line in cls.output.read_bytes().splitlines()]

    good = [json.dumps(request(f"good {n}")).encode() for n in range(2)]
    Files.input.write_bytes(b"\n".join([good[0], *wrong, good[1]]))
    Files.output.unlink(missing_ok=True)

    def reply(http_request):
        return httpx.Response(200, json={"asked": json.loads(http_request.content)})

    answers = answered_lines(Files, reply)
    assert (answers[0]["custom_id"], answers[-1]["custom_id"]) == ("good 0", "good 1")
    assert {answers[0]["response"]["status_code"], answers[-1]["response"]["status_code"]} == {200}
    blank = sum(not line.removeprefix(b"\xef\xbb\xbf").strip() for line in wrong)
    assert len(answers) == 2 + len(wrong) - blank


@given(st.from_regex(ROUTE, fullmatch=True))
def test_every_allowed_route_can_be_asked_for(url):
    client = httpx.AsyncClient(base_url="http://x")
    assert client.build_request("POST", url).url.host == "x"


def test_a_line_that_breaks_the_connection_fails_alone(files, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.0)
    files.write(request("a"), request("b", "poison"), request("c"))

    def reply(http_request):
        if b"poison" in http_request.content:
            raise httpx.RemoteProtocolError("closed without an answer")
        return httpx.Response(200, json={"choices": []})

    answers = answered_lines(files, reply)
    assert [a["response"] is not None for a in answers] == [True, False, True]
    assert answers[1]["error"]["code"] == "not_answered"
    assert "line 2: the server lives" in answers[1]["error"]["message"]


def test_any_answer_can_be_written(files):
    files.write(request("a"), request("b"), request("c"))
    contents = [b'{"text": "\\ud83d", "\\udfff": "\\\\"}', b"[" * 100_000, b"\xff\0"]

    def reply(http_request):
        return httpx.Response(200, content=contents.pop(0))

    answers = answered_lines(files, reply, concurrency=1)
    assert answers[0]["response"]["body"] == {"text": "\ud83d", "\udfff": "\\"}
    assert answers[1]["response"]["body"]["error"]["message"].startswith("[[[")
    assert answers[2]["response"]["body"]["error"]["type"] == "server_error"
    with BatchOutput(str(files.output)) as output:
        assert output.done == ["a", "b", "c"]


def test_a_run_goes_on_where_another_ended(files, shared_server, capsys):
    entries = [request(f"r{i}", f"prompt {i}") for i in range(6)]
    files.write(*entries)
    assert files.run(shared_server.url) == 0
    whole = files.output.read_text()
    lines = whole.splitlines(keepends=True)
    files.output.write_text("".join(lines[:3]) + lines[3][:40])  # cut short by a crash
    assert files.run(shared_server.url) == 0
    assert "3 answered, 0 refused, 0 unusable, 3 kept" in capsys.readouterr().err
    again = files.answers()
    assert files.output.read_text().startswith("".join(lines[:3]))
    before = [json.loads(line) for line in lines]
    for old, new in zip(before, again, strict=True):
        assert old["custom_id"] == new["custom_id"]
        assert old["response"]["body"]["choices"] == new["response"]["body"]["choices"]
    before_run = files.output.stat().st_mtime_ns
    assert files.run("http://127.0.0.1:9") == 0  # nothing is left to ask
    assert files.output.stat().st_mtime_ns == before_run
    files.write(*entries[:2])
    assert files.run(shared_server.url) == 2
    assert "'no such line'" in capsys.readouterr().err


def test_an_output_of_something_else_is_left_alone(files, shared_server, capsys):
    files.write(request("a"), request("b"))
    for text in ('{"custom_id": "z"}\n', "notes\n"):
        files.output.write_text(text)
        assert files.run(shared_server.url) == 2
        assert files.output.read_text() == text
        assert "name another" in capsys.readouterr().err


def test_what_is_missing_is_said(files, capsys):
    assert cli.main(["run-batch", f"output={files.output}"]) == 2
    assert "input is missing" in capsys.readouterr().err
    assert files.run("http://127.0.0.1:9") == 2
    assert "cannot be read" in capsys.readouterr().err
    files.write(request("a"))
    assert files.run("http://127.0.0.1:9", "concurrency=0") == 2
    with pytest.raises(ConfigError):
        BatchOutput(str(files.output / "x" / "y"))


def test_a_server_that_is_gone_ends_the_run(files, monkeypatch, capsys):
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.0)
    files.write(request("a"))
    assert files.run("http://127.0.0.1:9") == 1
    assert "does not answer" in capsys.readouterr().err
    assert files.output.read_text() == ""


class Busy(BaseHTTPRequestHandler):
    refusals = 3

    def do_POST(self):
        type(self).refusals -= 1
        status = 429 if self.refusals >= 0 else 200
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(status)
        self.send_header("retry-after", "0")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


def test_a_busy_server_is_asked_again(files):
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        files.write(request("a"))
        code = files.run(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert code == 0
    assert files.answers()[0]["response"]["status_code"] == 200
    assert Busy.refusals == -1


def test_answers_before_a_failure_are_kept(files, shared_server, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.0)
    files.write(*(request(f"r{i}") for i in range(8)))
    count = 0

    async def failing(http_request):
        nonlocal count
        count += 1
        if count > 4:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, json={"n": count})

    with pytest.raises(EngineError):
        answered_lines(files, failing)
    assert [a["custom_id"] for a in files.answers()] == ["r0", "r1", "r2", "r3"]
    assert files.run(shared_server.url) == 0
    assert [a["custom_id"] for a in files.answers()] == [f"r{i}" for i in range(8)]


def test_lines_in_flight_when_the_engine_dies_are_asked_again(files, shared_server, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.05)
    entries = [request(f"r{i}", f"prompt {i}", max_tokens=30, ignore_eos=True) for i in range(4)]
    files.write(request("short", max_tokens=1), *entries)
    with RunningServer(fail_at={12: EngineError("device lost")}) as server:
        assert files.run(server.url, "concurrency=2") == 1
    assert [a["custom_id"] for a in files.answers()] == ["short"]
    assert files.run(shared_server.url) == 0
    answers = files.answers()
    assert [a["custom_id"] for a in answers] == ["short", "r0", "r1", "r2", "r3"]
    assert {a["response"]["status_code"] for a in answers} == {200}


FAILED, LOST, GONE = (500, "generation_failed"), (500, "engine_error"), (503, "engine_error")


@pytest.mark.parametrize(
    ("replies", "is_ready", "outcome"),
    [
        ([FAILED], True, 500),
        ([FAILED, 200], False, 200),
        ([(500, "given_up")], True, 500),
        ([(500, None)], True, 500),
        ([LOST, GONE, GONE, GONE, 200], True, 200),
        ([LOST] * 3, True, "lost its engine"),
        ([FAILED] * 3, False, "lost its engine"),
        ([GONE] * batch_run.MAX_TRIES, True, "lost its engine"),
    ],
)
def test_an_error_is_the_line_s_own_or_the_engine_s(files, monkeypatch, replies, is_ready, outcome):
    monkeypatch.setattr(batch_run, "RETRY_SECONDS", 0.0)
    files.write(request("a"))
    left = list(replies)

    async def reply(http_request):
        if http_request.url.path == "/ready":
            return httpx.Response(200 if is_ready else 503)
        answer = left.pop(0)
        if answer == 200:
            return httpx.Response(200, json={"choices": []})
        status, code = answer
        return httpx.Response(status, json={"error": {"message": "no", "code": code}})

    if isinstance(outcome, str):
        with pytest.raises(EngineError, match=outcome):
            answered_lines(files, reply, concurrency=1)
        assert files.answers() == []
    else:
        answers = answered_lines(files, reply, concurrency=1)
        assert [a["response"]["status_code"] for a in answers] == [outcome]
    assert left == []


def fake_client():
    engine = fake_engine(support_tokenizer.byte_level())
    support_tokenizer.write_files(Path(engine.facts.model_path))
    return CoreClient(LocalTransport(lambda progress: engine))


def test_a_local_server_answers_its_owner_only():
    with LocalServer(fake_client(), SamplingConfig(), "fcfs", lambda event: None) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        headers = {"authorization": f"Bearer {server.key}"}
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
        url = server.url
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/health")


def test_a_local_server_that_cannot_start_says_why():
    def fail(progress):
        raise ConfigError("no such model")

    server = LocalServer(
        CoreClient(LocalTransport(fail)), SamplingConfig(), "fcfs", lambda event: None
    )
    with pytest.raises(ConfigError, match="no such model"), server:
        pass


def test_an_engine_of_its_own_answers(files, monkeypatch):
    from girih.serve.http import launch as launch_server

    monkeypatch.setattr(launch_server, "client_of", lambda engine, logs: fake_client())
    files.write(request("a", model="fake"), request("b", model="other"))
    words = [f"input={files.input}", f"output={files.output}", "opt=O0", "-q"]
    assert cli.main(["run-batch", *words]) == 0
    assert [a["response"]["status_code"] for a in files.answers()] == [200, 404]
