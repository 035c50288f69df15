"""The server with its core in another process: the same answers, and every way it can end."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import httpx
import pytest
import support_process
import support_tokenizer
from support_core import make_request
from support_fake_runner import fake_generate

from girih.kernels.base.errors import EngineError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.supervisor import ProcessTransport
from girih.serve.config import ServeConfig
from girih.serve.http.fleet import ApiFleet, FleetSettings
from girih.serve.http.server import GirihServer

SCRIPT = str(Path(__file__).parents[2] / "support" / "support_fake_server.py")
LONG = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class Server:
    """A server process over a fake model, started and killed by the test."""

    def __init__(self, folder, **options):
        options = {**model_in(folder), **options}
        self.vocab_size = options["vocab_size"]
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = None

    def wait_ready(self):
        line = self.process.stdout.readline()
        assert " is ready at " in line, line
        self.url = line.split(" at ")[1].split()[0]
        return self

    def get(self, path):
        return httpx.get(self.url + path, timeout=20)

    def post(self, path, **body):
        return httpx.post(self.url + path, json=body, timeout=20)

    def stream(self, **body):
        body = {**LONG, "stream": True, **body}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=20)

    def children(self, name):
        """Process ids of the server's children called `name`."""
        files = Path(f"/proc/{self.process.pid}/task").glob("*/children")  # one per thread
        pids = [int(word) for file in files for word in file.read_text().split()]
        return [pid for pid in pids if name_of(pid) == name]

    def core_pid(self):
        (pid,) = self.children("girih-core")
        return pid

    def wait_exit(self):
        """The exit code; the time limit only keeps a failing test from hanging."""
        return self.process.wait(60)


def model_in(folder):
    """Options of a fake model whose tokenizer is in a new folder there."""
    model = folder / "model"
    model.mkdir()
    tokenizer = support_tokenizer.byte_level()
    (model / "tokenizer.json").write_text(tokenizer._backend.to_str())
    return {"vocab_size": tokenizer.vocab_size, "model_path": str(model)}


def name_of(pid):
    """What a process calls itself; None when it has just ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.fixture
def serve(tmp_path):
    made = []

    def make(**options):
        made.append(Server(tmp_path, **options))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def last_events(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def tokens_of(answer):
    return answer.json()["choices"][0]["token_ids"]


def test_answers_are_those_of_the_model_and_end_with_code_0(serve):
    server = serve().wait_ready()
    assert server.get("/ready").status_code == 200
    answer = server.post("/v1/completions", **LONG, return_token_ids=True)
    request = make_request("a", LONG["prompt"], max_tokens=200)
    assert tokens_of(answer) == fake_generate(request, server.vocab_size, 256)
    assert server.post("/v1/completions", prompt=[1] * 300).status_code == 400
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_progress_of_the_other_process_is_shown_and_a_signal_ends_it(serve):
    server = serve(build_seconds=60)
    port = wait_listening(server.process.pid)
    server.url = f"http://127.0.0.1:{port}"
    wait_for(lambda: server.get("/ready").json().get("stage") == "compile")
    assert server.get("/health").status_code == 200
    core = server.core_pid()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not Path(f"/proc/{core}").exists()


def wait_listening(pid):
    """Port of the socket that process `pid` listens on."""

    def find():
        sockets = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(fd))
            except OSError:
                continue
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                return int(words[1].split(":")[1], 16)
        return None

    wait_for(lambda: find() is not None)
    return find()


def test_a_build_that_fails_ends_the_server_with_its_message(serve):
    server = serve(build_error="no such model")
    assert server.process.stdout.readline() == "error: no such model\n"
    assert server.wait_exit() == 1


@pytest.mark.parametrize("how", ["kill -9", "device lost"])
def test_the_death_of_the_core_ends_streams_and_the_server(serve, how):
    options = {"lose_device_at": 5} if how == "device lost" else {}
    server = serve(step_seconds=0.05, **options).wait_ready()
    with server.stream() as answer:
        lines = answer.iter_lines()
        next(lines)
        if how == "kill -9":
            os.kill(server.core_pid(), signal.SIGKILL)
        events = last_events(lines)
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
    # The server stays for two seconds so that probes see why; a slow test may come too late.
    assert {status_if_there(server, path) for path in ("/health", "/ready")} <= {503, None}
    assert server.wait_exit() == 1


def test_a_new_core_takes_over_what_waited(serve):
    server = serve(step_seconds=0.05, max_num_seqs=1, restarts=True).wait_ready()
    waiting = {}

    def ask():
        body = {**LONG, "max_tokens": 5, "return_token_ids": True}
        waiting["answer"] = server.post("/v1/completions", **body)

    with server.stream() as answer:
        lines = answer.iter_lines()
        next(lines)
        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.3)  # admitted, and behind the stream
        core = server.core_pid()
        os.kill(core, signal.SIGKILL)
        events = last_events(lines)
    assert "error" in json.loads(events[-2])
    asking.join()
    request = make_request("a", LONG["prompt"], max_tokens=5)
    assert tokens_of(waiting["answer"]) == fake_generate(request, server.vocab_size, 256)
    assert server.get("/ready").status_code == 200
    assert server.core_pid() != core


def test_a_request_that_ends_every_core_is_not_handed_over_again_and_others_are(serve):
    poison, body = 11, {**LONG, "max_tokens": 1, "return_token_ids": True}
    server = serve(step_seconds=0.6, poison=poison, restarts=True).wait_ready()
    first = server.core_pid()
    answers = {}

    def ask():
        answers["poison"] = server.post("/v1/completions", **{**body, "prompt": [5, poison, 7]})

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: server.children("girih-core") not in ([], [first]))
    # The second core is busy with that step now; a slow test may meet the third one.
    wait_for(lambda: server.get("/ready").status_code == 200)
    wait_for(lambda: answer_of_others(server, body, answers).status_code != 503)
    asking.join()
    assert answers["poison"].status_code == 500
    error = answers["poison"].json()["error"]
    assert "process ended 2 times" in error["message"]
    assert error["code"] == "given_up"
    request = make_request("a", LONG["prompt"], max_tokens=1)
    assert tokens_of(answers["other"]) == fake_generate(request, server.vocab_size, 256)
    assert server.get("/ready").status_code == 200


def answer_of_others(server, body, answers):
    answers["other"] = server.post("/v1/completions", **body)
    return answers["other"]


@pytest.mark.parametrize("api_processes", [1, 2])
def test_the_last_core_s_end_is_told_at_once_and_as_what_it_is(serve, api_processes):
    server = serve(
        step_seconds=0.2,
        poison=11,
        restarts=True,
        max_restarts=0,
        serve={"api_processes": api_processes, "drain_seconds": 60.0},
    ).wait_ready()
    answer = server.post("/v1/completions", **{**LONG, "prompt": [5, 11, 7]})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == (
        "generation failed: the engine stopped: EngineError: the engine process ended with code -9"
    )
    assert server.wait_exit() == 1


def test_a_drain_flips_ready_and_lets_requests_finish(serve):
    server = serve(step_seconds=0.02).wait_ready()
    with server.stream(max_tokens=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready").json()["status"] == "draining")
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        events = last_events(lines)
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0


@pytest.mark.parametrize("how", ["second signal", "time is up"])
def test_a_drain_ends_with_errors_when_it_must(serve, how):
    seconds = 60.0 if how == "second signal" else 0.3
    server = serve(step_seconds=0.1, serve={"drain_seconds": seconds}).wait_ready()
    with server.stream() as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_for(lambda: server.get("/ready").json()["status"] == "draining")
            server.process.send_signal(signal.SIGTERM)
        events = last_events(lines)
    assert "shutting down" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    assert server.wait_exit() == 0


def test_http_answers_while_a_step_holds_the_interpreter(serve):
    server = serve(hold_interpreter_seconds=4.0).wait_ready()
    body = {**LONG, "max_tokens": 1}
    asking = threading.Thread(target=server.post, args=("/v1/completions",), kwargs=body)
    asking.start()
    time.sleep(0.2)
    for _ in range(3):
        assert server.get("/health").status_code == 200
    assert asking.is_alive()  # all three were answered inside the one step
    asking.join()


def test_a_core_that_is_stopped_makes_health_fail(serve):
    server = serve(serve={"stall_seconds": 1.5}).wait_ready()
    core = server.core_pid()
    os.kill(core, signal.SIGSTOP)
    wait_for(lambda: server.get("/health").status_code == 503)
    assert server.get("/ready").status_code == 503
    os.kill(core, signal.SIGCONT)
    wait_for(lambda: server.get("/health").status_code == 200)


def test_several_api_processes_share_a_core_and_are_replaced(serve):
    server = serve(step_seconds=0.005, serve={"api_processes": 2}).wait_ready()
    request = make_request("a", LONG["prompt"], max_tokens=20)
    expected = fake_generate(request, server.vocab_size, 256)
    for _ in range(4):
        body = {**LONG, "max_tokens": 20, "return_token_ids": True}
        assert tokens_of(server.post("/v1/completions", **body)) == expected
    victim, *others = server.children("girih-api")
    with server.stream() as answer:  # one of the two serves this
        lines = answer.iter_lines()
        next(lines)
        for pid in (victim, *others):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    wait_for(lambda: len(set(server.children("girih-api")) - {victim, *others}) == 2)
    wait_for(lambda: status_if_there(server, "/ready") == 200)
    assert tokens_of(server.post("/v1/completions", **body)) == expected
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_a_fleet_told_to_stop_while_it_starts_ends(tmp_path, monkeypatch):
    config = ServeConfig(port=0, api_processes=2)
    build = functools.partial(support_process.build, **model_in(tmp_path))
    fleet = ApiFleet(build, FleetSettings(config))
    start = SpawnProcess.start

    def start_and_stop(process):
        start(process)
        if process.name == "girih-api-0":
            fleet.stop()  # this one is not known yet, the other one not begun

    monkeypatch.setattr(SpawnProcess, "start", start_and_stop)
    running = threading.Thread(target=fleet.run)
    running.start()
    running.join(20)
    ended = not running.is_alive()
    fleet.stop()
    running.join()
    assert ended


def test_api_processes_end_with_the_main_process(serve):
    server = serve(serve={"api_processes": 2}).wait_ready()
    wait_for(lambda: len(server.children("girih-api")) == 2)  # one of them is ready before
    pids = [*server.children("girih-api"), server.core_pid()]
    server.process.kill()
    wait_for(lambda: not any(map(support_process.alive, pids)))


@pytest.mark.parametrize("api_processes", [1, 2])
def test_a_server_that_cannot_listen_leaves_no_folder(tmp_path, monkeypatch, api_processes):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    build = support_process.build
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1], api_processes=api_processes)
        if api_processes == 1:
            server = GirihServer(CoreClient(ProcessTransport(build)), config)
        else:
            server = ApiFleet(build, FleetSettings(config))
        assert list(tmp_path.iterdir())
        with pytest.raises(EngineError, match="cannot listen"):
            server.run()
    assert not list(tmp_path.iterdir())


def status_if_there(server, path):
    try:
        return server.get(path).status_code
    except httpx.TransportError:
        return None
