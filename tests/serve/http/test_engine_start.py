"""A server and a core's process: what is told to whom while the engine is not there yet."""

import functools
import os
import signal
import threading

import httpx
import pytest
import support_process
import support_tokenizer
from support_process import wait_for

from girih.kernels.base.errors import EngineError, SourceError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.supervisor import ProcessTransport
from girih.serve.config import ServeConfig
from girih.serve.http.server import GirihServer
from girih.serve.text import tokenizer_ahead

TOKENIZER = support_tokenizer.byte_level()


class Started:
    """A server over a core's process, in a thread of this one."""

    def __init__(self, progress=lambda event: None, tokenizer=None, **options):
        options["vocab_size"] = TOKENIZER.vocab_size
        build = functools.partial(support_process.build, **options)
        self.transport = ProcessTransport(build)
        self.client = CoreClient(self.transport)
        self.client.start()
        self.client.start()  # once is enough
        self.pid = self.transport.supervisor.pid
        self.lines, self.error = [], None
        self.server = GirihServer(
            self.client,
            ServeConfig(port=0, drain_seconds=0.0),
            tokenizer=tokenizer,
            progress=progress,
            announce=self.lines.append,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.server.run()
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_a_core_that_was_begun_is_joined():
    with Started(tokenizer=TOKENIZER) as started:
        wait_for(lambda: started.lines)
        assert started.lines[0].startswith("fake is ready")
        assert started.transport.supervisor.pid == started.pid
        url = f"http://127.0.0.1:{started.server.port}/v1/completions"
        assert httpx.post(url, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert not support_process.alive(started.pid)


def test_a_core_that_ended_before_somebody_listened_says_why():
    started = Started(tokenizer=TOKENIZER, build_error="no such model")
    wait_for(lambda: not started.transport.supervisor.is_running)
    with started:
        wait_for(lambda: started.error)
    assert isinstance(started.error, SourceError)
    assert "no such model" in str(started.error)


def test_the_tokenizer_is_loaded_while_the_core_builds(monkeypatch, tmp_path):
    seen = []

    def load(path):
        seen.append(path)
        return TOKENIZER

    monkeypatch.setattr(tokenizer_ahead, "load_tokenizer", load)
    told = lambda event: seen.append(event.detail)  # noqa: E731
    with Started(told, model_path=str(tmp_path), build_seconds=1.0) as started:
        wait_for(lambda: started.lines)
        assert started.server.state.served.tokenizer is TOKENIZER
    assert seen.count(tmp_path) == 1
    assert "tile 2 of 3" in seen[seen.index(tmp_path) :], "the core still built"


def test_a_core_that_dies_while_the_tokenizer_is_loaded_fails_the_start(monkeypatch, tmp_path):
    started = Started(model_path=str(tmp_path))

    def load(path):
        wait_for(started.client.ready.done)
        os.kill(started.pid, signal.SIGKILL)
        wait_for(lambda: started.client.error)
        return TOKENIZER

    monkeypatch.setattr(tokenizer_ahead, "load_tokenizer", load)
    with started:
        wait_for(lambda: started.error)
    assert isinstance(started.error, EngineError)
    assert "the engine process ended" in str(started.error)
    assert started.lines == []


def test_a_tokenizer_that_cannot_be_loaded_fails_the_start(tmp_path):
    with Started(model_path=str(tmp_path)) as started:
        wait_for(lambda: started.error)
    with pytest.raises(SourceError, match=tmp_path.name):
        raise started.error
