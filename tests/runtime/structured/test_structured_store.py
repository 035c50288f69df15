"""The store compiles grammars once, elsewhere, and keeps a bounded number."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import wait

import msgspec
import pytest
from support_core import make_request, run_to_end
from support_grammars import EOS, VOCAB, accept, grammar_rows, plan, request
from support_tokenizer import _trained_byte_level

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured import backends
from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary


def test_compilation_happens_once_and_elsewhere(vocabulary):
    started, go_on = threading.Event(), threading.Event()
    threads = []

    def slow_vocabulary():
        threads.append(threading.current_thread())
        started.set()
        assert go_on.wait(20)
        return vocabulary

    store, woken = GrammarStore(slow_vocabulary), threading.Event()
    store.on_ready(woken.set)
    params = SamplingParams(structured=StructuredOutput.choice(["a"]))
    pending = store.start(params)
    assert started.wait(20)
    assert not pending.done()
    assert store.start(SamplingParams()) is None
    go_on.set()
    assert woken.wait(20)
    store.wait(20)
    assert pending.done()
    assert store.start(params) is pending
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_the_cache_is_bounded_and_keyed_by_form(store):
    forms = [StructuredOutput.choice([f"x{i}"]) for i in range(10)]
    for form in forms:
        store.matcher(form)
    assert len(store._recent) == 4
    gc.collect()
    assert len(store._held) == 4
    again = msgspec.structs.replace(forms[-1], param="elsewhere")
    assert store.start(SamplingParams(structured=again)).done()


def test_more_forms_than_the_cache_holds_all_become_ready(new_core, vocabulary):
    go_on = threading.Event()

    def slow_vocabulary():
        assert go_on.wait(20)
        return vocabulary

    store, core = GrammarStore(slow_vocabulary, max_grammars=4), new_core()
    core.scheduler.pending_grammars = store
    forms = [StructuredOutput.choice([f"x{i}"]) for i in range(10)]
    for index, form in enumerate(forms):
        core.add_request(make_request(f"r{index}", structured=form, max_tokens=2))
    assert len(core.scheduler.blocked) == 10
    compiled = [request.pending_grammar for request in core.scheduler.requests.values()]
    go_on.set()
    wait(compiled, timeout=20)
    assert [store.start(SamplingParams(structured=form)) for form in forms] == compiled
    assert len(run_to_end(core)) == 10


def test_a_form_that_cannot_be_compiled_keeps_its_error(store):
    form = StructuredOutput.grammar("start: <[9999]>")
    backends.check(form)  # control tokens are looked up with the vocabulary
    for _ in range(2):
        with pytest.raises(RequestError, match="could not be compiled"):
            store.matcher(form)


class Damaged:
    """A library's backend, grammar and matcher at once; `place` raises."""

    is_stopped, error = False, ""

    def __init__(self, place):
        self._place, self.backend = place, self

    def _do(self, place):
        if place == self._place:
            raise KeyError("the library is damaged")

    def compile(self, structured):
        self._do("compile")
        return self

    def matcher(self):
        self._do("matcher")
        return self

    def accept(self, token_id):
        self._do("accept")
        return True


@pytest.mark.parametrize("place", ["compile", "matcher", "accept"])
def test_what_a_library_raises_ends_its_request_alone(store, monkeypatch, place):
    monkeypatch.setattr(store, "_backend", lambda name: Damaged(place))
    rows = grammar_rows(store)
    rows.update(plan([request("bad", StructuredOutput.choice(["ab"]))]))
    errors = accept(rows, ["bad", "free"], [7, 7])
    assert list(errors) == ["bad"]
    assert "the library is damaged" in errors["bad"]


def test_a_model_without_the_means(tmp_path):
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, VOCAB, (EOS,))
    (tmp_path / "tokenizer.json").write_text(_trained_byte_level())
    with pytest.raises(RequestError, match="end-of-sequence"):
        read_vocabulary(tmp_path, VOCAB, ())
