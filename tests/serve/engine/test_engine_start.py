"""Starting an engine's process before there is an event loop."""

import asyncio
import functools
import os
import signal
import time

import pytest
import support_process

from girih.kernels.base.errors import EngineError, SourceError
from girih.kernels.base.progress import no_progress
from girih.serve.engine.engine_start import ProcessStart
from girih.serve.text import tokenizer_ahead

TOKENIZER = object()


def started(**options):
    build = functools.partial(support_process.build, **options)
    start = ProcessStart(build, tokenizer=TOKENIZER)
    start.begin()
    start.begin()  # once is enough
    return start


def test_a_core_that_was_begun_is_joined():
    start = started()
    process = start.supervisor.pid
    assert process is not None

    async def join():
        engine = await start.start(no_progress)
        engine.link.close()
        assert engine.tokenizer is TOKENIZER
        return engine.facts.name

    try:
        assert asyncio.run(join()) == "fake"
        assert start.supervisor.pid == process
    finally:
        start.close()


def test_a_core_that_ended_before_somebody_listened_says_why():
    start = started(build_error="no such model")
    deadline = time.monotonic() + 60
    while start.supervisor.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        with pytest.raises(SourceError, match="no such model"):
            asyncio.run(start.start(no_progress))
    finally:
        start.close()


def test_the_tokenizer_is_loaded_while_the_core_builds(monkeypatch, tmp_path):
    seen = []

    def load(path):
        seen.append(path)
        return TOKENIZER

    monkeypatch.setattr(tokenizer_ahead, "load_tokenizer", load)
    build = functools.partial(support_process.build, model_path=str(tmp_path), build_seconds=1.0)
    start = ProcessStart(build)

    async def join():
        engine = await start.start(lambda event: seen.append(event.detail))
        engine.link.close()
        return engine.tokenizer

    try:
        assert asyncio.run(join()) is TOKENIZER
    finally:
        start.close()
    assert seen.count(tmp_path) == 1
    assert "tile 2 of 3" in seen[seen.index(tmp_path) :], "the core still built"


def test_a_core_that_dies_while_the_tokenizer_is_loaded_fails_the_start(monkeypatch, tmp_path):
    start = ProcessStart(functools.partial(support_process.build, model_path=str(tmp_path)))

    def load(path):
        time.sleep(1.0)  # until the core is ready
        os.kill(start.supervisor.pid, signal.SIGKILL)
        support_process.wait_for(lambda: not start.supervisor.is_running)
        return TOKENIZER

    monkeypatch.setattr(tokenizer_ahead, "load_tokenizer", load)
    try:
        with pytest.raises(EngineError, match="the engine process ended"):
            asyncio.run(start.start(no_progress))
    finally:
        start.close()


def test_a_tokenizer_that_cannot_be_loaded_fails_the_start(tmp_path):
    build = functools.partial(support_process.build, model_path=str(tmp_path))
    start = ProcessStart(build)
    try:
        with pytest.raises(SourceError, match=tmp_path.name):
            asyncio.run(start.start(no_progress))
    finally:
        start.close()
