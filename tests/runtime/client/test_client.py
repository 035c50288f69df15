"""One client, and the same behaviour of a core behind every transport."""

import functools
import time

import msgspec
import pytest
import support_process
from support_clients import TRANSPORTS, WaitingClient
from support_core import make_request
from support_fake_runner import fake_generate
from support_process import wait_for

from girih.kernels.base.errors import EngineError, RequestError, SourceError
from girih.kernels.base.progress import no_progress
from girih.runtime.client.supervisor import ProcessTransport
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams


def transport(kind, **options):
    return TRANSPORTS[kind](functools.partial(support_process.build, **options))


@pytest.fixture(params=TRANSPORTS)
def kind(request):
    return request.param


@pytest.fixture
def connect(kind):
    """Factory of clients over one kind of transport; closes them."""
    made = []

    def make(progress=no_progress, **options):
        made.append(WaitingClient(transport(kind, **options), progress))
        return made[-1]

    yield make
    for client in made:
        client.close()
        client.close()


def test_tokens_are_those_of_each_request_alone(connect):
    events = []
    client = connect(events.append, num_blocks=24, max_num_batched_tokens=48, max_num_seqs=8)
    assert {event.stage for event in events} <= {"model", "compile"}
    assert client.client.facts.name == "fake"
    requests = [make_request(f"r{i}", 5 + 11 * i % 70, max_tokens=30) for i in range(20)]
    client.add(*requests)
    done = client.run_to_end()
    for request in requests:
        assert done[request.request_id].tokens == fake_generate(request, 1000, 256)
    stats = client.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_cache.num_free_blocks == stats.kv_cache.num_blocks
    client.call("check_integrity")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_handed_over_together_run_together(connect, is_async):
    client = connect(async_scheduling=is_async, step_seconds=0.02)
    client.add(*(make_request(f"r{i}", max_tokens=6) for i in range(12)))
    assert all(len(entry.tokens) == 6 for entry in client.run_to_end().values())
    assert client.stats().num_steps <= 7


def test_refused_requests_do_not_hold_up_the_others(connect):
    client = connect()
    with pytest.raises(RequestError, match="prompt has 300") as caught:
        client.add(make_request("a", max_tokens=3), make_request("long", 300))
    assert caught.value.param == "prompt"
    assert len(client.run_to_end()["a"].tokens) == 3


def test_a_call_that_fails_raises_its_own_class_and_text(connect):
    client = connect()
    with pytest.raises(RequestError, match="no method 'explode'"):
        client.call("explode")
    client.add(make_request("a", max_tokens=3))
    assert len(client.run_to_end()["a"].tokens) == 3


def test_an_abort_frees_what_the_request_held(connect):
    client = connect(step_seconds=0.01)
    client.add(make_request("a", max_tokens=200))
    client.step()
    client.abort(["a"])
    assert not client.unfinished
    wait_for(lambda: client.stats().num_running == 0)
    assert client.stats().finished == {"abort": 1}


def test_a_failed_build_is_raised_as_it_was(kind):
    with pytest.raises(SourceError, match="no such model"):
        WaitingClient(transport(kind, build_error="no such model"))


def test_the_death_of_a_core_ends_its_requests(connect):
    client = connect(lose_device_at=3)
    client.add(make_request("a", max_tokens=50), make_request("b", max_tokens=50))
    done = client.run_to_end()
    assert {entry.finish_reason for entry in done.values()} == {"error"}
    wait_for(lambda: client.client.poll() or client.client.error)
    with pytest.raises(EngineError, match=r"died.*device lost"):
        client.add(make_request("c"))


def test_a_closed_client_takes_nothing(connect):
    client = connect()
    client.close()
    with pytest.raises(EngineError, match="closed"):
        client.add(make_request("a"))


@pytest.mark.parametrize("kind", [k for k in TRANSPORTS if k != "stepped"], indirect=True)
def test_a_core_without_its_own_thread_takes_what_came_before_it_plans(connect):
    client = connect(async_scheduling=False, step_seconds=0.2)
    client.add(make_request("a", max_tokens=4))
    time.sleep(0.05)  # the first step runs
    client.add(make_request("b", max_tokens=4))
    client.run_to_end()
    assert client.stats().num_steps == 5


@pytest.mark.parametrize("kind", ["process"], indirect=True)
def test_a_core_that_is_killed_ends_its_requests(connect):
    client = connect(kill_at=3)
    client.add(make_request("a", max_tokens=50), make_request("b", max_tokens=50))
    assert {entry.finish_reason for entry in client.run_to_end().values()} == {"error"}


@pytest.mark.parametrize("kind", ["process"], indirect=True)
def test_what_the_core_cannot_read_is_refused_and_others_go_on(connect):
    client = connect()
    client.add(make_request("good", max_tokens=20))
    odd = SamplingParams(max_tokens=3)
    msgspec.structs.force_setattr(odd, "ignore_eos", "yes")
    with pytest.raises(RequestError, match="cannot read the request: Expected `bool`, got `str`"):
        client.add(
            *(EngineRequest(request_id=name, prompt_token_ids=[1], sampling=odd) for name in "ab")
        )
    negative = SamplingParams(max_tokens=3)
    msgspec.structs.force_setattr(negative, "temperature", -1.0)
    with pytest.raises(RequestError, match=r"temperature is -1\.0"):
        client.add(EngineRequest(request_id="a", prompt_token_ids=[1], sampling=negative))
    client.client.transport._socket.send(b"\xc1 no message at all")
    assert len(client.run_to_end()["good"].tokens) == 20
    client.call("check_integrity")


@pytest.mark.parametrize("kind", ["process"], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [{"cache_salt": "\ud800"}, {"priority": 2**70}],
    ids=["half a character", "70 bits"],
)
def test_what_cannot_travel_is_refused(connect, wrong):
    client = connect()
    with pytest.raises(RequestError, match="cannot be sent to the engine's process"):
        client.add(make_request("a", **wrong))
    assert not client.unfinished
    client.add(make_request("a", max_tokens=3))
    assert len(client.run_to_end()["a"].tokens) == 3


def test_a_core_ends_with_its_client():
    client = WaitingClient(ProcessTransport(support_process.build))
    assert isinstance(client.client.transport, ProcessTransport)
    pid = client.client.transport.supervisor.pid
    assert support_process.alive(pid)
    client.close()
    assert not support_process.alive(pid)
