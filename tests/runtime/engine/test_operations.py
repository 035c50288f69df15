"""Sleep, wake and new weights: what happens to requests, and in which order."""

import threading

import pytest
from support_core import collect, make_request, run_to_end
from support_fake_runner import FakeRunner

from girih.kernels.base.errors import BusyError, RequestError, UnavailableError, WeightError
from girih.runtime.client.control import call_method
from girih.runtime.client.loop import admit, answer_call
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import Call


class MemoryFake(FakeRunner):
    """A fake runner that notes what is done to its memory, and refuses to run without it."""

    def __init__(self, block_size=16, vocab_size=1000, **options):
        super().__init__(block_size, vocab_size, **options)
        self.done = []
        self.level = 0
        self.wake_error = None
        self.threads = set()

    def execute(self, plan):
        self.threads.add(threading.get_ident())
        assert self.level == 0, "a step was run asleep"
        return super().execute(plan)

    def sleep(self, level):
        self.threads.add(threading.get_ident())
        self.level = level
        self.done.append(f"sleep {level}")

    def wake(self):
        if self.wake_error:
            raise self.wake_error
        self.level = 0
        self.done.append("wake")

    def reload_weights(self, path):
        if path == "wrong":
            raise RequestError("path names another model", "path")
        self.done.append(f"reload {path}")
        return "as recorded"


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def core(request, new_core):
    made = new_core(runner=MemoryFake(), async_scheduling=request.param)
    yield made
    made.close()


def ask(core: EngineCore, method, **arguments):
    return call_method(core, method, arguments)


def test_an_idle_core_sleeps_and_wakes(core):
    core.add_request(make_request("a", 40, max_tokens=4))
    expected = run_to_end(core)["a"].tokens
    assert core.stats().kv_cache.prefix_queries > 0
    assert ask(core, "sleep").sleep_level == 1
    with pytest.raises(UnavailableError, match=r"asleep \(level 1\).*wake"):
        core.add_request(make_request("b"))
    assert not core.has_work()
    assert ask(core, "wake").sleep_level == 0
    core.add_request(make_request("a", 40, max_tokens=4))
    again = run_to_end(core)["a"]
    assert again.tokens == expected
    assert again.outputs[0].num_cached_tokens == 0  # its blocks hold nothing any more
    assert core.runner.done == ["sleep 1", "wake"]
    assert len(core.runner.threads) == 1  # all of it where steps run


def test_a_sleep_gets_deeper_but_not_lighter(core):
    ask(core, "sleep", level=1)
    ask(core, "sleep", level=2)
    ask(core, "sleep", level=2)
    assert ask(core, "sleep", level=1).sleep_level == 2
    ask(core, "wake")
    ask(core, "wake")
    assert core.runner.done == ["sleep 1", "sleep 2", "wake"]


def test_running_requests_are_in_the_way(core):
    core.add_request(make_request("a", max_tokens=20))
    core.step()
    with pytest.raises(BusyError, match=r"1 requests are unfinished; mode=wait .* mode=abort"):
        ask(core, "sleep")
    with pytest.raises(BusyError):
        ask(core, "reload_weights")
    assert core.stats().operation.sleep_level == 0
    assert run_to_end(core)["a"].finish_reason == "length"


def test_waiting_lets_requests_end_and_takes_no_new_ones(core):
    core.add_request(make_request("a", max_tokens=20))
    core.add_request(make_request("b", max_tokens=9))
    core.step()
    assert ask(core, "sleep", level=2, mode="wait").pending == "sleep (level 2)"
    with pytest.raises(UnavailableError, match=r"sleep \(level 2\) follows"):
        core.add_request(make_request("c"))
    ended = run_to_end(core)
    assert {name: len(entry.tokens) for name, entry in ended.items()}.keys() == {"a", "b"}
    assert ask(core, "operation").sleep_level == 2
    assert core.runner.done == ["sleep 2"]


def test_aborting_ends_everything_and_says_so(core):
    collected = {}
    for name in "ab":
        core.add_request(make_request(name, max_tokens=50))
    collect(collected, core.step())
    assert ask(core, "sleep", mode="abort").sleep_level == 1
    outputs = core.take_outputs()
    assert {o.request_id: o.finish_reason for o in outputs} == {"a": "abort", "b": "abort"}
    assert core.take_outputs() == []
    assert not core.is_running
    core.check_integrity()


def test_a_paused_core_cannot_wait(core):
    core.add_request(make_request("a", max_tokens=5))
    core.pause()
    with pytest.raises(BusyError, match="paused"):
        ask(core, "sleep", mode="wait")
    core.resume()
    run_to_end(core)


def test_a_wake_that_fails_can_be_tried_again(core):
    ask(core, "sleep")
    core.runner.wake_error = WeightError("no such file")
    with pytest.raises(WeightError):
        ask(core, "wake")
    assert ask(core, "operation").sleep_level == 1
    core.runner.wake_error = None
    ask(core, "wake")
    core.add_request(make_request("a", max_tokens=2))
    assert len(run_to_end(core)["a"].tokens) == 2


def test_new_weights_make_cached_prefixes_void(core):
    core.add_request(make_request("a", 40, max_tokens=2))
    run_to_end(core)
    ask(core, "reload_weights", path="other")
    core.add_request(make_request("a", 40, max_tokens=2))
    assert run_to_end(core)["a"].outputs[0].num_cached_tokens == 0
    with pytest.raises(RequestError, match="another model"):
        ask(core, "reload_weights", path="wrong")
    assert core.runner.done == ["reload other"]


def test_what_fails_after_a_wait_is_told(core):
    core.add_request(make_request("a", max_tokens=5))
    core.step()
    ask(core, "reload_weights", path="wrong", mode="wait")
    run_to_end(core)
    state = ask(core, "operation")
    assert (state.pending, state.error) == (None, "path names another model")
    core.add_request(make_request("b", max_tokens=2))  # the old weights serve on
    assert len(run_to_end(core)["b"].tokens) == 2


def test_a_sleeping_core_takes_no_weights(core):
    ask(core, "sleep")
    with pytest.raises(BusyError, match="wake it first"):
        ask(core, "reload_weights")
    ask(core, "wake")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 3}, "level is 3; it is 1 .* or 2"),
        ({"level": "deep"}, "level is 'deep'"),
        ({"mode": "now"}, "mode is 'now'; it is one of refuse, abort, wait"),
    ],
)
def test_senseless_arguments_are_refused(core, arguments, message):
    with pytest.raises(RequestError, match=message):
        ask(core, "sleep", **arguments)


def test_a_runner_that_keeps_its_memory_says_so(new_core):
    with pytest.raises(RequestError, match="no sleep and wake"):
        ask(new_core(), "sleep")


def test_a_sleep_that_waits_can_be_called_off(core):
    core.add_request(make_request("a", max_tokens=5))
    core.step()
    ask(core, "sleep", mode="wait")
    assert ask(core, "wake").pending is None
    core.add_request(make_request("b", max_tokens=2))
    assert run_to_end(core).keys() == {"a", "b"}
    assert core.runner.done == []


def test_what_waits_is_not_forgotten_for_something_else(core):
    core.add_request(make_request("a", max_tokens=20))
    core.step()
    ask(core, "sleep", mode="wait")
    for mode in ("wait", "abort"):
        with pytest.raises(BusyError, match=r"sleep \(level 1\) follows .* loading weights after"):
            ask(core, "reload_weights", mode=mode)
    assert run_to_end(core)["a"].finish_reason == "length"
    assert core.runner.done == ["sleep 1"]


def test_no_call_brings_the_core_down(core):
    core.add_request(make_request("a", max_tokens=9))
    core.runner.reload_weights = lambda path: (_ for _ in ()).throw(OSError("disk on fire"))
    answer = answer_call(core, Call(1, "reload_weights", {"mode": "abort"}))
    assert (answer.refusal.kind, answer.refusal.message) == ("EngineError", "OSError: disk on fire")
    answer = answer_call(core, Call(2, "sleep", {"depth": 1}))
    assert "depth" in answer.refusal.message
    core.add_request(make_request("b", max_tokens=9))
    ask(core, "reload_weights", mode="wait")
    assert len(run_to_end(core)["b"].tokens) == 9
    assert ask(core, "operation").error == "OSError: disk on fire"
    core.add_request(make_request("c", max_tokens=3))
    assert len(run_to_end(core)["c"].tokens) == 3


def test_a_request_that_cannot_be_taken_in_leaves_nothing(core):
    broken = make_request("a", 40, cache_salt="half of a character: \ud800")
    admission = admit(core, broken)
    assert "UnicodeEncodeError" in admission.refusal.message
    core.check_integrity()
    assert not core.has_requests
    core.add_request(make_request("a", 40, max_tokens=3))
    assert len(run_to_end(core)["a"].tokens) == 3
