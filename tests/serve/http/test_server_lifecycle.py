"""Readiness, disconnects, a slow or dying engine, the end of the process."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import httpx
import pytest
from support_serving import RunningServer

from girih.kernels.base.errors import EngineError, SourceError
from girih.serve.config import ServeConfig
from girih.serve.http.port import open_port

LONG = {"prompt": "one two", "max_tokens": 200, "ignore_eos": True}


def test_port_answers_while_the_engine_is_built(new_server):
    hold = threading.Event()
    server = new_server(hold=hold)
    assert server.get("/health").status_code == 200
    ping = httpx.post(f"{server.url}/ping")  # a 200 would bring requests
    assert (ping.status_code, ping.json()["error"]["code"]) == (503, "loading")
    assert server.get("/load").json() == {"server_load": 0}
    ready = server.get("/ready")
    assert ready.status_code == 503
    body = ready.json()
    assert (body["status"], body["stage"], body["done"], body["total"]) == (
        "loading",
        "compile",
        1,
        3,
    )
    for answer in (
        server.post("/v1/completions", prompt="a"),
        server.post("/v1/completions", nonsense=True),
        server.get("/v1/models"),
    ):
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["type"] == "server_error"
    assert server.lines == []
    hold.set()
    server.wait_for(lambda: server.get("/ready").status_code == 200)
    assert [httpx.request(m, f"{server.url}/ping").status_code for m in ("GET", "POST")] == [
        200
    ] * 2
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    (line,) = server.lines
    assert server.url in line
    assert "curl" in line


def test_a_failed_build_ends_the_server_with_its_error():
    server = RunningServer(build_error=SourceError("no such model"))
    server.__enter__()
    server.join()
    assert isinstance(server.error, SourceError)


def test_describing_routes(shared_server):
    (card,) = shared_server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("fake", 256)
    one = shared_server.get("/v1/models/fake").json()
    assert one["default_sampling"]["temperature"] == 1.0
    assert shared_server.get("/version").json()["version"]
    for prefix in ("", "/v1"):
        text = "one 😀 <|im_end|>"
        tokens = shared_server.post(f"{prefix}/tokenize", prompt=text, return_token_strs=True)
        body = tokens.json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        back = shared_server.post(f"{prefix}/detokenize", tokens=body["tokens"])
        assert back.json() == {"prompt": text}
    chat = shared_server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["tokens"] == shared_server.tokenizer.encode(
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert shared_server.post("/tokenize").status_code == 400
    idle = shared_server.post("/tokenize", prompt="x", add_generation_prompt=True)
    assert idle.json()["error"]["param"] == "add_generation_prompt"
    assert shared_server.post("/detokenize", tokens=[99999]).status_code == 400


def test_a_reader_that_leaves_frees_its_blocks(new_server):
    server = new_server(step_seconds=0.02)
    body = {**LONG, "stream": True, "n": 2, "temperature": 1}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert len(server.core.scheduler.requests) == 2
    steps = server.core.stats().num_steps
    server.wait_idle()
    assert server.core.stats().num_steps - steps < 20
    assert server.core.stats().finished["abort"] == 2


def test_a_client_that_hangs_up_on_a_whole_answer_frees_its_blocks(new_server):
    server = new_server(step_seconds=0.02)
    raw = json.dumps(LONG).encode()
    with socket.create_connection(("127.0.0.1", server.server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        server.wait_for(lambda: len(server.core.scheduler.requests) == 1)
    server.wait_idle()
    assert server.core.stats().finished["abort"] == 1


def test_the_load_is_what_is_being_answered(new_server):
    server = new_server(step_seconds=0.05)

    def load():
        return server.get("/load").json()["server_load"]

    body = {**LONG, "stream": True, "n": 3}  # one request, however many choices
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=body),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body),
    ):
        background = {"background": True, "ignore_eos": True}
        begun = server.post("/v1/responses", input="a", **background).json()
        assert load() == 3
        server.post(f"/v1/responses/{begun['id']}/cancel")
        assert load() == 2
    server.wait_for(lambda: load() == 0)
    server.wait_idle()


def test_http_answers_during_a_slow_step(new_server):
    server = new_server(step_seconds=0.8)
    asked = threading.Thread(
        target=server.post,
        args=("/v1/completions",),
        kwargs={
            "prompt": "a",
            "max_tokens": 2,
        },
    )
    with httpx.Client(timeout=30) as client:  # making one takes longer than a request
        assert client.get(f"{server.url}/health").status_code == 200
        asked.start()
        server.wait_for(lambda: server.server.state.served.engine._client.seconds_stuck() > 0)
        for _ in range(5):
            assert client.get(f"{server.url}/health").status_code == 200
    # All five were answered inside the one step.
    assert server.core.stats().num_steps == 0
    asked.join()


def test_a_stuck_step_makes_health_fail(new_server):
    server = new_server(step_seconds=1.0, serve={"stall_seconds": 0.2})
    asked = threading.Thread(
        target=server.post,
        args=("/v1/completions",),
        kwargs={
            "prompt": "a",
            "max_tokens": 1,
        },
    )
    asked.start()
    server.wait_for(lambda: server.get("/health").status_code == 503)
    assert server.get("/ready").status_code == server.get("/ping").status_code == 503
    asked.join()
    server.wait_for(lambda: server.get("/health").status_code == 200)


def test_silence_is_filled_with_comments(new_server):
    server = new_server(step_seconds=0.5, serve={"keep_alive_seconds": 0.1})
    body = {**LONG, "max_tokens": 2, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = list(answer.iter_lines())
    assert ": keep-alive" in lines
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"


def test_a_failed_step_fails_its_requests_only(new_server):
    server = new_server(fail_at={2: ValueError("boom")})
    body = {**LONG, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_dead_engine_ends_every_stream_and_the_server():
    server = RunningServer(fail_at={3: EngineError("device lost")}, serve={"drain_seconds": 2.0})
    with server:
        whole = server.post("/v1/completions", **LONG)
        assert whole.status_code in (500, 503)
        assert "device lost" in whole.json()["error"]["message"]
        assert server.get("/health").status_code == 503
        assert server.get("/ready").json()["status"] == "failed"
        later = server.post("/v1/completions", prompt="a")
        assert later.status_code == 503
        server.join()
    assert isinstance(server.error, EngineError)


def test_a_port_in_use_is_a_clear_error():
    with open_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"{port}.*in use"):
            open_port("127.0.0.1", port)
    with pytest.raises(EngineError, match="choose another"):
        open_port("203.0.113.7", 0)


SCRIPT = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from support_serving import fake_engine
    import support_tokenizer
    from girih.serve.config import ServeConfig
    from girih.runtime.client.client import CoreClient
    from girih.runtime.client.local_transport import LocalTransport
    from girih.serve.http.server import GirihServer
    tokenizer = support_tokenizer.byte_level()
    server = GirihServer(
        CoreClient(LocalTransport(lambda progress: fake_engine(tokenizer, step_seconds=0.05))),
        ServeConfig(port=0, drain_seconds=5.0),
        tokenizer=tokenizer,
        announce=lambda line: print(line, flush=True),
    )
    sys.exit(server.run())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_after_running_requests(number):
    support = str(Path(__file__).parents[2] / "support")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), support],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    ) as process:
        line = process.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        body = {"prompt": "a", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = [text for text in lines if text]
        out, err = process.communicate(timeout=20)
    assert rest[-1] == "data: [DONE]"
    assert (process.returncode, out, err) == (0, "", "")


def test_a_model_answers_to_each_of_its_names(new_server):
    server = new_server(serve={"model_names": ("one", "org/two")})
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["one", "org/two"]
    for name in ("one", "org/two"):
        assert server.get(f"/v1/models/{name}").json()["id"] == name
        answer = server.post("/v1/completions", model=name, prompt="a", max_tokens=1)
        assert answer.json()["model"] == "one"
    refused = server.post("/v1/completions", model="fake", prompt="a", max_tokens=1)
    assert refused.status_code == 404
    assert "this server has 'one', 'org/two'" in refused.json()["error"]["message"]
    assert server.get("/status").json()["model"] == "one"
    assert server.lines[0].startswith("one is ready at")


@pytest.mark.parametrize(
    ("serve", "model", "names", "engine_name"),
    [
        ({}, {"source": "smollm2"}, (), None),
        ({}, {"source": "smollm2", "name": "mine"}, (), "mine"),
        ({}, {"source": "org/some-model"}, ("some-model", "org/some-model"), "some-model"),
        ({}, {"source": "org/some-model", "name": "mine"}, (), "mine"),
        ({"model_names": ("a", "b")}, {"source": "org/some-model"}, ("a", "b"), "a"),
        ({"model_names": ("a",)}, {"source": "smollm2", "name": "mine"}, None, None),
    ],
)
def test_server_and_engine_agree_on_the_name(serve, model, names, engine_name):
    from girih.kernels.base.errors import ConfigError
    from girih.runtime.records.config import EngineConfig, ModelConfig
    from girih.serve.http.launch import agreed_names

    engine, config = EngineConfig(model=ModelConfig(**model)), ServeConfig(**serve)
    if names is None:
        with pytest.raises(ConfigError, match=r"model\.name is 'mine'.*set one"):
            agreed_names(engine, config)
        return
    engine, config = agreed_names(engine, config)
    assert (config.model_names, engine.model.name) == (names, engine_name)


def test_sampling_defaults_that_are_unusual_are_logged_at_the_start(new_server, caplog):
    caplog.set_level("INFO", "girih.serve.http.server")
    server = new_server(sampling={"temperature": 0.2, "top_p": 1.0, "max_tokens": 9})
    server.get("/ready")
    (line,) = (r.message for r in caplog.records if r.name == "girih.serve.http.server")
    assert line == "requests that say nothing else take temperature 0.2, max_tokens 9"


def test_settings_are_checked():
    from girih.kernels.base.errors import ConfigError

    for wrong in (
        {"port": 70000},
        {"api_keys": ("",)},
        {"max_n": 0},
        {"stall_seconds": 0},
        {"model_names": ("",)},
        {"model_names": ("a", "a")},
    ):
        with pytest.raises(ConfigError):
            ServeConfig(**wrong)


def test_access_lines_do_not_hold_the_prompt(new_server, caplog):
    server = new_server()
    with caplog.at_level("INFO", "girih.access"):
        server.post("/v1/completions", prompt="a secret", max_tokens=1)
        server.wait_for(lambda: caplog.records)
        time.sleep(0.05)
    text = caplog.text
    assert "POST /v1/completions 200" in text
    assert "secret" not in text
