"""Routes of the operator."""

import threading

import httpx
import pytest
from support_fake_runner import FakeRunner

from girih.kernels.base.errors import RequestError

KEY = {"authorization": "Bearer root"}
LONG = {"prompt": "one two", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def server(new_server):
    return new_server(serve={"admin_key": "root", "api_keys": ("user",)}, step_seconds=0.02)


def admin(server, verb, **body):
    return httpx.post(f"{server.url}/admin/{verb}", headers=KEY, json=body, timeout=20)


def complete(server, headers=None, **body):
    headers = {"authorization": "Bearer user", **(headers or {})}
    return httpx.post(
        f"{server.url}/v1/completions", headers=headers, json={**LONG, **body}, timeout=30
    )


def test_without_a_key_there_are_no_such_routes(shared_server):
    answer = shared_server.post("/admin/pause")
    assert answer.status_code == 404
    assert "exist with serve.admin_key=KEY" in answer.json()["error"]["message"]


def test_each_key_opens_its_own_routes(server):
    assert httpx.get(f"{server.url}/admin/config").status_code == 401
    user = {"authorization": "Bearer user"}
    assert httpx.get(f"{server.url}/admin/config", headers=user).status_code == 401
    assert httpx.get(f"{server.url}/v1/models", headers=KEY).status_code == 401
    unknown = httpx.post(f"{server.url}/admin/nothing", headers=KEY)
    assert unknown.json()["error"]["message"] == "no route POST /admin/nothing"
    shown = httpx.get(f"{server.url}/admin/config", headers=KEY)
    assert shown.json()["serve"]["max_n"] == 128
    assert "root" not in shown.text
    assert "user" not in shown.text


def test_a_named_request_is_aborted_and_others_go_on(server):
    answers = {}

    def ask(name):
        answers[name] = complete(server, {"x-request-id": name}, max_tokens=60).json()

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "a-b")]
    for thread in threads:
        thread.start()
    server.wait_for(lambda: len(server.core.scheduler.running) == 2)
    assert admin(server, "abort", request_id="a").json() == {"num_aborted": 1}
    for thread in threads:
        thread.join()
    assert answers["a"]["choices"][0]["finish_reason"] == "abort"
    assert answers["a-b"]["choices"][0]["finish_reason"] == "length"
    assert admin(server, "abort").json() == {"num_aborted": 0}


def abort_one(server, path, body):
    """The answer to a request that an operator ends while it runs."""
    answers = []
    headers = {"authorization": "Bearer user"}

    def ask():
        url = f"{server.url}{path}"
        answers.append(httpx.post(url, headers=headers, json=body, timeout=30).json())

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for(lambda: len(server.core.scheduler.running) == 1)
    assert admin(server, "abort").json() == {"num_aborted": 1}
    thread.join()
    return answers[0]


def test_an_aborted_response_is_incomplete_and_not_kept(server):
    body = {"input": "Hello", "max_output_tokens": 200, "ignore_eos": True}
    answer = abort_one(server, "/v1/responses", body)
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    assert answer["incomplete_details"] == {"reason": "abort"}
    assert answer["output"][-1]["status"] == "incomplete"
    headers = {"authorization": "Bearer user"}
    found = httpx.get(f"{server.url}/v1/responses/{answer['id']}", headers=headers)
    assert found.status_code == 404


def test_an_aborted_message_is_cut_off(server):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 200, "ignore_eos": True}
    answer = abort_one(server, "/v1/messages", body)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] < 200


def test_a_pause_holds_requests_until_the_engine_resumes(server):
    assert admin(server, "pause").json() == {"status": "paused"}
    done = threading.Event()

    def ask():
        complete(server, max_tokens=2)
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not done.wait(0.4)
    assert admin(server, "resume").json() == {"status": "running"}
    assert done.wait(10)
    thread.join()


def test_the_prefix_cache_is_forgotten(server):
    prompt = list(range(100, 164))

    def cached():
        usage = complete(server, prompt=prompt, max_tokens=1).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert admin(server, "reset_prefix_cache").status_code == 200
    assert cached() == 0


class MemoryFake(FakeRunner):
    """A fake runner with memory to give up."""

    def sleep(self, level):
        """Nothing to do."""

    def wake(self):
        """Nothing to do."""

    def reload_weights(self, path):
        if path == "other":
            raise RequestError("path names another model", "path")
        return "ok"


@pytest.fixture
def sleeper(new_server):
    runner = MemoryFake(16, 421, step_seconds=0.02)
    return new_server(serve={"admin_key": "root", "api_keys": ("user",)}, runner=runner)


def test_an_engine_sleeps_and_wakes(sleeper):
    answer = admin(sleeper, "sleep?level=2")
    assert answer.json() == {"status": "asleep", "level": 2}
    ready = sleeper.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "asleep")
    assert ready.json()["sleep_level"] == 2
    assert sleeper.get("/health").status_code == 200
    refused = complete(sleeper)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert "asleep (level 2)" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    headers = {"authorization": "Bearer user"}
    status = sleeper.get("/status", headers=headers).json()
    assert (status["status"], status["engine"]["operation"]["sleep_level"]) == ("asleep", 2)
    assert admin(sleeper, "wake").json() == {"status": "awake"}
    assert sleeper.get("/ready").status_code == 200
    assert complete(sleeper, max_tokens=2).status_code == 200


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_running_requests_end_before_a_sleep(sleeper, mode, reason):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(sleeper, max_tokens=60)))
    thread.start()
    sleeper.wait_for(lambda: len(sleeper.core.scheduler.running) == 1)
    busy = admin(sleeper, "sleep")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
    assert admin(sleeper, f"sleep?mode={mode}").json() == {"status": "asleep", "level": 1}
    thread.join()
    assert answers[0].json()["choices"][0]["finish_reason"] == reason
    admin(sleeper, "wake")


def test_weights_are_loaded_in_place(sleeper):
    assert admin(sleeper, "reload_weights").json() == {"status": "ok"}
    refused = admin(sleeper, "reload_weights", path="other", mode="wait")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
    assert complete(sleeper, max_tokens=2).status_code == 200


@pytest.mark.parametrize("query", ["level=0", "level=x", "level=1&mode=later"])
def test_a_senseless_sleep_is_refused(sleeper, query):
    assert admin(sleeper, f"sleep?{query}").status_code == 400
