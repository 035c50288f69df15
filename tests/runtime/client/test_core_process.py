"""A core in a process of its own: the same tokens, and what happens when a process dies."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import support_process
from support_core import collect, make_request
from support_fake_runner import fake_generate
from support_process import alive, wait_for

from girih.kernels.base.errors import ConfigError, EngineError, RequestError, SourceError
from girih.kernels.base.progress import no_progress
from girih.runtime.client.core_connection import CoreConnection, Disconnected
from girih.runtime.client.core_process import CoreSupervisor
from girih.runtime.client.remote_core import RemoteCore
from girih.runtime.client.socket_folder import SocketFolder
from girih.runtime.records.messages import AddRequest, Call, Outputs, Ready
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams


def engine(**options):
    return functools.partial(support_process.build, **options)


@pytest.fixture
def remote():
    """Factory of cores in processes of their own."""
    made = []

    def make(progress=no_progress, **options):
        made.append(RemoteCore(engine(**options), progress))
        return made[-1]

    yield make
    for core in made:
        core.close()


def run_to_end(core):
    collected = {}
    while core.has_work():
        collect(collected, core.step())
    return collected


def test_tokens_are_those_of_each_request_alone(remote):
    events = []
    core = remote(events.append, num_blocks=24, max_num_batched_tokens=48, max_num_seqs=8)
    assert [event.stage for event in events] == ["compile"] * len(events)
    requests = [make_request(f"r{i}", 5 + 11 * i % 70, max_tokens=30) for i in range(20)]
    for request in requests:
        core.add_request(request)
    done = run_to_end(core)
    for request in requests:
        assert done[request.request_id].tokens == fake_generate(request, 1000, 256)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_cache.num_free_blocks == stats.kv_cache.num_blocks
    core.check_integrity()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_handed_over_together_run_together(remote, is_async):
    core = remote(async_scheduling=is_async, step_seconds=0.02)
    core.add_requests([make_request(f"r{i}", max_tokens=6) for i in range(12)])
    done = run_to_end(core)
    assert all(len(entry.tokens) == 6 for entry in done.values())
    assert core.stats().num_steps <= 7


def test_refused_requests_do_not_hold_up_the_others(remote):
    core = remote()
    with pytest.raises(RequestError, match="prompt has 300"):
        core.add_requests([make_request("a", max_tokens=3), make_request("long", 300)])
    assert len(run_to_end(core)["a"].tokens) == 3


def test_a_core_without_its_own_thread_takes_what_came_before_it_plans(remote):
    core = remote(async_scheduling=False, step_seconds=0.2)
    core.add_request(make_request("a", max_tokens=4))
    time.sleep(0.05)  # the first step runs
    core.add_request(make_request("b", max_tokens=4))
    run_to_end(core)
    assert core.stats().num_steps == 5


def test_refusals_cross_the_border_with_their_class(remote):
    core = remote()
    with pytest.raises(RequestError, match="prompt has 300") as caught:
        core.add_request(make_request("long", 300))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="no method 'explode'"):
        core.call("explode")
    assert not core.has_work()


def test_an_abort_frees_what_the_request_held(remote):
    core = remote(step_seconds=0.01)
    core.add_request(make_request("a", max_tokens=200))
    core.step()
    core.abort(["a"])
    assert not core.has_work()
    wait_for(lambda: core.stats().num_running == 0)
    assert core.stats().finished == {"abort": 1}


def test_a_failed_build_is_raised_as_it_was():
    with pytest.raises(SourceError, match="no such model"):
        RemoteCore(engine(build_error="no such model"), no_progress)


@pytest.mark.parametrize("how", ["lose_device_at", "kill_at"])
def test_the_death_of_a_core_ends_its_requests(remote, how):
    core = remote(**{how: 3})
    # Together: on a slow machine the core could be at its third step before a second call.
    core.add_requests([make_request("a", max_tokens=50), make_request("b", max_tokens=50)])
    done = run_to_end(core)
    assert {entry.finish_reason for entry in done.values()} == {"error"}
    with pytest.raises(EngineError, match="died"):
        core.add_request(make_request("c"))


def test_a_core_ends_with_its_front_end(remote):
    core = RemoteCore(engine(), no_progress)
    pid = core._supervisor.pid
    assert alive(pid)
    core.close()
    assert not alive(pid)


def test_a_core_ends_when_its_front_end_is_killed(tmp_path):
    file = tmp_path / "pid"
    process = multiprocessing.get_context("spawn").Process(
        target=support_process.orphan, args=(str(file),)
    )
    process.start()
    wait_for(lambda: file.exists() and file.read_text())
    pid = int(file.read_text())
    assert alive(pid)
    process.kill()
    process.join()
    wait_for(lambda: not alive(pid))


def test_a_script_whose_exit_handlers_run_in_another_order_ends():
    """Who made a `TemporaryDirectory` first has multiprocessing wait for children first."""
    code = (
        "import tempfile; folder = tempfile.TemporaryDirectory()\n"
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "import support_process\n"
        "from girih.kernels.base.progress import no_progress\n"
        "from girih.serve.offline.remote_handle import RemoteHandle\n"
        "if __name__ == '__main__':\n"
        "    handle = RemoteHandle(support_process.build, no_progress)\n"
        "    print(handle.name)\n"
    )
    support = os.path.dirname(support_process.__file__)
    ended = subprocess.run(
        [sys.executable, "-c", code, support], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("fake\n", 0), ended.stderr


def test_a_path_that_no_socket_can_have_is_refused(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match=r"allows 107: set TMPDIR to a folder"):
        SocketFolder()
    assert list(long.iterdir()) == []


def test_the_next_start_removes_what_a_killed_front_end_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    file = tmp_path / "pid"
    process = multiprocessing.get_context("spawn").Process(
        target=support_process.orphan, args=(str(file),)
    )
    process.start()
    wait_for(lambda: file.exists() and file.read_text())
    (theirs,) = tmp_path.glob("girih-core-*")
    alive_beside = SocketFolder()
    wait_for((theirs / "core").exists)
    assert theirs.exists(), "a living front end keeps its folder"
    process.kill()
    process.join()
    wait_for(lambda: not alive(int(file.read_text())))
    assert theirs.exists(), "nobody could remove it"
    ours = SocketFolder()
    assert not theirs.exists()
    assert alive_beside.path.exists() and ours.path.exists()
    for folder in (ours, alive_beside):
        folder.remove()
        folder.remove()
    assert not list(tmp_path.glob("girih-core-*"))


class FrontEnd:
    """A connection that remembers what came."""

    def __init__(self, address):
        self.connection = CoreConnection(address)
        self.received = []

    def wait_for(self, kind, count=1):
        def came():
            self.connection.wait(0.01)
            self.received += self.connection.receive()
            return sum(isinstance(message, kind) for message in self.received) >= count

        wait_for(came)
        return [message for message in self.received if isinstance(message, kind)]


@pytest.fixture
def supervised():
    """Factory of (supervisor, errors it reported)."""
    made = []

    def make(restart=False, **options):
        errors = []
        supervisor = CoreSupervisor(engine(**options), restart, errors.append)
        supervisor.start()
        made.append(supervisor)
        return supervisor, errors

    yield make
    for supervisor in made:
        supervisor.stop()


def test_two_front_ends_share_a_core_and_one_that_leaves_is_cleaned_up(supervised):
    supervisor, _ = supervised(step_seconds=0.01)
    one, two = FrontEnd(supervisor.address), FrontEnd(supervisor.address)
    for name, front_end in (("one", one), ("two", two)):
        front_end.wait_for(Ready)
        front_end.connection.send(AddRequest(make_request(name, max_tokens=200)))
        front_end.wait_for(Outputs)
        named = {o.request_id for m in front_end.wait_for(Outputs) for o in m.outputs}
        assert named == {name}
    one.connection.close()

    def only_two_runs():
        two.connection.send(Call(1, "stats"))
        answers = [m for m in two.connection.receive() if hasattr(m, "value")]
        return any(a.value["num_running"] == 1 for a in answers)

    wait_for(only_two_runs)
    two.connection.close()


def test_a_core_that_was_ready_is_started_again_at_the_same_address(supervised):
    supervisor, errors = supervised(restart=True)
    front_end = FrontEnd(supervisor.address)
    front_end.wait_for(Ready)
    first = supervisor.pid
    os.kill(first, signal.SIGKILL)
    front_end.wait_for(Disconnected)
    front_end.wait_for(Ready, 2)
    assert supervisor.pid != first
    front_end.connection.send(AddRequest(make_request("a", max_tokens=3)))
    front_end.wait_for(Outputs)
    assert errors == []
    front_end.connection.close()


def test_without_restart_the_end_is_reported_with_its_code(supervised):
    supervisor, errors = supervised()
    front_end = FrontEnd(supervisor.address)
    front_end.wait_for(Ready)
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: errors)
    assert "code -9" in str(errors[0])
    front_end.connection.close()


def test_a_core_that_never_was_ready_is_not_started_again(supervised):
    _, errors = supervised(restart=True, build_error="no such model")
    wait_for(lambda: errors)
    assert isinstance(errors[0], SourceError)


def test_what_the_core_cannot_read_is_refused_and_others_go_on(remote):
    core = remote()
    core.add_request(make_request("good", max_tokens=20))
    odd = SamplingParams(max_tokens=3)
    msgspec.structs.force_setattr(odd, "ignore_eos", "yes")
    with pytest.raises(RequestError, match="cannot read the request: Expected `bool`, got `str`"):
        core.add_requests(
            [EngineRequest(request_id=name, prompt_token_ids=[1], sampling=odd) for name in "ab"]
        )
    negative = SamplingParams(max_tokens=3)
    msgspec.structs.force_setattr(negative, "temperature", -1.0)
    with pytest.raises(RequestError, match=r"temperature is -1\.0"):
        core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1], sampling=negative))
    core._connection._socket.send(b"\xc1 no message at all")
    assert len(run_to_end(core)["good"].tokens) == 20
    core.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [{"cache_salt": "\ud800"}, {"priority": 2**70}],
    ids=["half a character", "70 bits"],
)
def test_what_cannot_travel_is_refused(remote, wrong):
    core = remote()
    with pytest.raises(RequestError, match="cannot be sent to the engine's process"):
        core.add_request(make_request("a", **wrong))
    assert not core.has_work()
    core.add_request(make_request("a", max_tokens=3))
    assert len(run_to_end(core)["a"].tokens) == 3
