import threading

import msgspec
import pytest
import support_tokenizer
from support_serving import fake_engine

from girih.kernels.base.errors import SourceError
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.client.local_transport import SteppedTransport
from girih.serve.offline import llm
from girih.serve.text import tokenizer_ahead
from girih.serve.text.tokenizer_ahead import TokenizerAhead


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tokenizer.json").write_text(support_tokenizer._trained_byte_level())
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """Threads that loaded a tokenizer."""
    right, loads = tokenizer_ahead.load_tokenizer, []

    def load(path):
        loads.append(threading.current_thread())
        return right(path)

    monkeypatch.setattr(tokenizer_ahead, "load_tokenizer", load)
    return loads


def found(path):
    return ProgressEvent("model", 1, 1, "tiny", str(path))


def test_loads_beside_the_build_once_the_model_is_found(model, loads):
    events = []
    ahead = TokenizerAhead(events.append)
    told = [
        ProgressEvent("fetch", 0, None),
        found(model),
        found(model),
        ProgressEvent("trace", 1, 1),
    ]
    for event in told:
        ahead.on_progress(event)
    assert ahead.result(model).encode("a")
    assert events == told
    assert len(loads) == 1
    assert loads[0] is not threading.current_thread()


def test_loads_when_asked_if_nothing_or_another_model_was_found(model, loads, tmp_path):
    assert TokenizerAhead(lambda event: None).result(model).encode("a")
    ahead = TokenizerAhead(lambda event: None)
    ahead.on_progress(found(tmp_path / "other"))
    assert ahead.result(model).encode("a")
    assert loads.count(threading.current_thread()) == 2


def test_what_is_wrong_with_it_is_said_when_it_is_asked_for(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    ahead = TokenizerAhead(lambda event: None)
    ahead.on_progress(found(tmp_path))
    with pytest.raises(SourceError, match=r"tokenizer\.json could not be read"):
        ahead.result(tmp_path)


def test_an_engine_without_a_tokenizer_is_closed(monkeypatch, tmp_path):
    closed = []
    engine = fake_engine(support_tokenizer.byte_level())
    engine.facts = msgspec.structs.replace(engine.facts, model_path=str(tmp_path))
    engine.core.closers.append(lambda: closed.append(True))
    monkeypatch.setattr(llm, "_transport", lambda config: SteppedTransport(lambda _: engine))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError):
        llm.LLM(str(tmp_path))
    assert closed == [True]
