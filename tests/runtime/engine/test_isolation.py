"""A fault of one request at any stage of a step, and what others beside it must not feel of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_core import make_request, run_to_end
from support_fake_runner import fake_generate
from support_tensor_runner import TensorFakeRunner

from girih.kernels.base.errors import EngineError, RequestError
from girih.runtime.engine.observers import CoreObserver
from girih.runtime.isolation import RowFailures, describe, each
from girih.runtime.records.messages import Admission, Refusal, decode_message, encode
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.sample import sampler
from girih.runtime.sample.logits_processors import LogitsProcessor, NamedProcessor
from girih.runtime.step import generate as model_runner

VOCAB, BLOCK, LENGTH, ROWS = 1024, 16, 96, 12
CULPRIT = "culprit"
MARK = 1023  # a token that only culprits have in their prompt


class Fault(Exception):
    """What is injected."""


def fail(*_args, **_kwargs):
    raise Fault("injected")


class Plugin(LogitsProcessor):
    """Wants every row with arguments, changes nothing, and fails where it is told to."""

    how = ""

    def __init__(self, vocab_size, max_num_seqs):
        super().__init__(vocab_size, max_num_seqs)
        self.bad = set()

    def add(self, row, request):
        if request.request_id.startswith(CULPRIT):
            if self.how == "add":
                fail()
            self.bad.add(row)
        return request.sampling.extra_args is not None

    def drop(self, row):
        if row in self.bad:
            self.bad.remove(row)
            if self.how == "drop":
                fail()

    def move(self, source, target):
        if source in self.bad:
            self.bad.remove(source)
            self.bad.add(target)
            if self.how == "move":
                fail()

    def apply(self, logits, rows, tokens):
        if self.bad & set(rows.tolist()):
            if self.how == "apply":
                fail()
            if self.how == "nan":
                logits[[row in self.bad for row in rows.tolist()]] = np.nan
            if self.how == "shape":
                return logits[:1, :5]
        return logits


class Matcher:
    """Allows everything, and fails where the form of its request says so."""

    is_stopped, error = False, ""

    def __init__(self, backend, structured):
        self.backend, self.how = backend, structured.text

    def accept(self, token_id):
        if "accept" in self.how:
            fail()
        return "refuse" not in self.how


class Grammars:
    """A store and its library in one."""

    def matcher(self, structured):
        if "matcher" in structured.text:
            fail()
        return Matcher(self, structured)

    def fill(self, matchers, rows, mask):
        for matcher, row in zip(matchers, rows, strict=True):
            if "fill" in matcher.how:
                fail()
            mask[row] = -1


def form(text):
    return {"structured": StructuredOutput.choice([text])}


def when_culprit(name, owner, attribute, monkeypatch):
    """Have a method fail for arguments in which `name` finds the culprit."""
    real = getattr(owner, attribute)

    def call(*args, **kwargs):
        found = name(*args)
        if found is not None and str(found).startswith(CULPRIT):
            fail()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, call)


def rows_of(core):
    """Rows of the batch that culprits have."""
    return {row for i, row in core.runner.batch.row_of.items() if i.startswith(CULPRIT)}


def row_enters(core, patch):
    when_culprit(lambda row, new: new.request_id, core.runner.batch._sampling, "set", patch)


def row_goes_on(core, patch):
    when_culprit(lambda update: update.request_id, core.runner.batch, "_continue", patch)


def settings_gathered(core, patch):
    def name(rows, *_history):
        return CULPRIT if rows_of(core) & set(rows.tolist()) else None

    when_culprit(name, core.runner.batch._sampling, "gather", patch)


def inputs_made(core, patch):
    when_culprit(lambda plan, request_ids: max(request_ids), core.runner.batch, "gather", patch)


def model(core, patch):
    def name(inputs):
        return CULPRIT if MARK in inputs.ids.tolist() else None

    when_culprit(name, core.runner.replays, "run", patch)


def sampling(core, patch):
    def name(logits, inputs):
        drawn = inputs.temperature
        return CULPRIT if drawn is not None and 0.5 in drawn.tolist() else None

    when_culprit(name, model_runner, "sample", patch)


def scores(core, patch):
    def name(logits, token_ids, numbers):
        return CULPRIT if 7 in numbers else None

    when_culprit(name, sampler, "_score_rows", patch)


def digestion(core, patch):
    when_culprit(
        lambda part, result: part.request.request_id, core.scheduler, "_process_output", patch
    )


def taken_into_the_cache(core, patch):
    when_culprit(lambda request, end: request.request_id, core.scheduler.kv_cache, "take_in", patch)


def plugin(how):
    return lambda core, patch: patch.setattr(Plugin, "how", how)


def nothing(core, patch):
    pass


ARGUMENTS = {"extra_args": {"plug": 1}}
STAGES = {
    "row enters": (row_enters, {}),
    "row goes on": (row_goes_on, {}),
    "settings gathered": (settings_gathered, {}),
    "inputs made": (inputs_made, {}),
    "model": (model, {}),
    "sampling": (sampling, {"temperature": 0.5}),
    "logprobs": (scores, {"logprobs": 7}),
    "prompt logprobs": (scores, {"prompt_logprobs": 7}),
    "plug-in takes its row": (plugin("add"), ARGUMENTS),
    "plug-in": (plugin("apply"), ARGUMENTS),
    "plug-in gives no numbers": (plugin("nan"), ARGUMENTS),
    "plug-in gives another shape": (plugin("shape"), ARGUMENTS),
    "grammar": (nothing, form("matcher")),
    "grammar's mask": (nothing, form("fill")),
    "grammar's step": (nothing, form("accept")),
    "grammar refuses": (nothing, form("refuse")),
    "result digested": (digestion, {}),
    "blocks cached": (taken_into_the_cache, {}),
}
MESSAGES = {"plug-in gives no numbers": "not numbers", "plug-in gives another shape": "logits",
            "grammar refuses": "cannot keep its form"}  # fmt: skip
BESIDE = [{}, {"logprobs": 2}, ARGUMENTS, form("fine"), {"prompt_logprobs": 1}, {"max_tokens": 40}]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request, new_core):
    processors = (NamedProcessor("plug", Plugin(VOCAB, ROWS)),)
    runner = TensorFakeRunner(ROWS, LENGTH, BLOCK, VOCAB, processors=processors, store=Grammars())
    made = new_core(
        64, BLOCK, LENGTH, runner=runner, max_num_seqs=ROWS, async_scheduling=request.param
    )
    yield made
    made.close()


def start(core, fields, num_culprits=3):
    """Culprits among greedy requests; returns the latter."""
    beside = []
    for number, other in enumerate(BESIDE):
        own = {"max_tokens": 12, **other, "temperature": 0}
        beside.append(make_request(f"beside{number}", 5 + 7 * number, **own))
    requests = list(beside)
    for number in range(num_culprits):
        own = {"max_tokens": 20, "temperature": 0, **fields}
        place = (0, 3, 4, 8, 2)[number]
        requests.insert(place, make_request(f"{CULPRIT}{number}", [4, MARK, number + 5], **own))
    for request in requests:
        core.add_request(request)
    return beside


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_stage_ends_its_request_alone(core, stage, monkeypatch, caplog):
    install, fields = STAGES[stage]
    install(core, monkeypatch)
    beside = start(core, fields)
    done = run_to_end(core)
    for number in range(3):
        culprit = done[f"{CULPRIT}{number}"]
        assert culprit.finish_reason == "error"
        assert MESSAGES.get(stage, "injected") in culprit.outputs[-1].error
    for request in beside:
        assert done[request.request_id].tokens == fake_generate(request, VOCAB, LENGTH)
        assert done[request.request_id].finish_reason == "length"
    assert core.stats().finished == {"error": 3, "length": len(beside)}
    assert core.stats().num_failed_steps == 0
    assert core.failure is None
    assert "injected" in caplog.text or stage in MESSAGES
    monkeypatch.undo()
    again = make_request(f"{CULPRIT}0", 8, max_tokens=3, temperature=0)
    core.add_request(again)
    assert run_to_end(core)[again.request_id].tokens == fake_generate(again, VOCAB, LENGTH)
    batch = core.runner.batch
    assert list(batch.row_of) == [again.request_id]  # its end is told with the next plan
    assert batch.failures.texts(done) == {}


@pytest.mark.parametrize("stage", ["sampling", "grammar", "row enters"])
def test_failing_requests_one_after_the_other_do_not_end_the_core(core, stage, monkeypatch, caplog):
    install, fields = STAGES[stage]
    install(core, monkeypatch)
    for number in range(6):
        name = f"{CULPRIT}{number}"
        core.add_request(make_request(name, [4, MARK], **{"temperature": 0, **fields}))
        assert run_to_end(core)[name].finish_reason == "error"
    assert core.failure is None


def test_a_step_that_fails_for_everybody_fails(core, monkeypatch, caplog):
    core.runner.replays.run = fail
    for name in "ab":
        core.add_request(make_request(name, 4))
    done = run_to_end(core)
    assert {entry.outputs[-1].error for entry in done.values()} == {"Fault: injected"}
    assert core.stats().num_failed_steps == 1


def test_a_fault_that_does_not_come_back_fails_nobody(core, monkeypatch, caplog):
    real, calls = core.runner.replays.run, []

    def run(inputs):
        calls.append(inputs)
        return fail() if len(calls) == 3 else real(inputs)

    core.runner.replays.run = run
    beside = start(core, {}, num_culprits=0)
    done = run_to_end(core)
    for request in beside:
        assert done[request.request_id].tokens == fake_generate(request, VOCAB, LENGTH)


def test_states_that_were_advanced_are_not_advanced_again(new_core, monkeypatch, caplog):
    runner: Any = TensorFakeRunner(ROWS, LENGTH, BLOCK, VOCAB)
    runner.executable.layout.state_specs = ("recurrent",)
    core = new_core(64, BLOCK, LENGTH, runner=runner, max_num_seqs=ROWS)
    calls = []
    runner.replays.run = lambda inputs: fail(calls.append(inputs))
    for name in "ab":
        core.add_request(make_request(name, 4))
    core.step()
    assert len(calls) == 1
    assert core.stats().finished == {"error": 2}


def test_a_lost_device_is_nobodys_fault(core, monkeypatch, caplog):
    def lose(logits, inputs):
        raise EngineError("device lost")

    monkeypatch.setattr(model_runner, "sample", lose)
    start(core, {})
    done = run_to_end(core)
    assert {entry.outputs[-1].error for entry in done.values()} == {"device lost"}
    assert core.failure == "device lost"


@pytest.mark.parametrize("how", ["move", "drop"])
def test_a_plug_in_that_fails_when_rows_change(core, how, monkeypatch, caplog):
    monkeypatch.setattr(Plugin, "how", how)
    first = make_request("first", 3, max_tokens=2, temperature=0, **ARGUMENTS)
    last = make_request(f"{CULPRIT}", 4, max_tokens=9, temperature=0, **ARGUMENTS)
    middle = make_request("middle", 5, max_tokens=20, temperature=0, **ARGUMENTS)
    for request in (first, middle, last):  # the last one moves when the first ends
        core.add_request(request)
    done = run_to_end(core)
    assert "injected" in caplog.text
    assert done[CULPRIT].finish_reason == ("error" if how == "move" else "length")
    for request in (first, middle):
        assert done[request.request_id].tokens == fake_generate(request, VOCAB, LENGTH)


class Nosy(CoreObserver):
    """Fails at whatever it is told."""

    on_request = on_step = on_end = close = fail


def test_an_observer_that_fails_is_not_missed(core, caplog):
    core.observers.insert(0, Nosy())
    seen = []

    class Witness(CoreObserver):
        def on_step(self, report):
            seen.extend(report.outputs)

    core.observers.append(Witness())
    beside = start(core, {}, num_culprits=0)
    core.add_request(make_request("aborted", 4, max_tokens=50))
    core.abort(["aborted"])
    done = run_to_end(core)
    for request in beside:
        assert done[request.request_id].tokens == fake_generate(request, VOCAB, LENGTH)
    assert sum(len(output.new_token_ids) for output in seen) >= 40
    core.close_observers()
    told = [record for record in caplog.records if "Nosy" in record.getMessage()]
    assert len(told) == 1  # not at every step


# ---- the owner ----


def test_halves_are_tried_until_single_ones_fail():
    failures, tried = RowFailures(), []
    names = [f"r{i}" for i in range(9)]

    def work(part):
        tried.append(part)
        if {"r2", "r7"} & set(names[part]):
            fail()
        return names[part]

    parts = failures.split(names, work)
    assert [found for _, found in parts] == [["r0", "r1"], ["r3"], ["r4", "r5"], ["r6"], ["r8"]]
    assert [names[part] for part, _ in parts] == [found for _, found in parts]
    assert failures.texts(names) == {"r2": "Fault: injected", "r7": "Fault: injected"}
    assert failures.spared(names) == [name for name in names if name not in ("r2", "r7")]
    assert failures.split([], work) == []
    failures.forget(["r2"])
    assert "r2" not in failures and "r7" in failures


def test_what_is_nobodys_fault_passes_through():
    failures = RowFailures()
    for error in (EngineError("device lost"), KeyboardInterrupt()):

        def work(_, error=error):
            raise error

        with pytest.raises(type(error)):
            failures.split(["a", "b"], work)
        with pytest.raises(type(error)):
            failures.each([("a", 1)], work)
        with pytest.raises(type(error)):
            each([1], work, lambda item, error: None)
    assert failures.texts("ab") == {}


def test_texts_of_errors_can_be_sent():
    assert describe(ValueError("x\ud83d")) == "ValueError: x\\ud83d"
    assert describe(EngineError("gone")) == "gone"
    for error in (RequestError("x\ud83d"), KeyError("x\ud83d")):
        assert decode_message(encode(Admission("a", Refusal.of(error)))).refusal.message
