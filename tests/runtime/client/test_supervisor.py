"""The process of a core: who ends it, what starts it again, and what it leaves behind."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import support_process
from support_core import make_request
from support_process import alive, wait_for

from girih.kernels.base.errors import ConfigError, SourceError
from girih.runtime.client.socket_folder import SocketFolder
from girih.runtime.client.supervisor import CoreSupervisor
from girih.runtime.client.transport import Disconnected
from girih.runtime.client.zmq_transport import ZmqTransport
from girih.runtime.records.messages import AddRequests, Call, Outputs, Ready


def engine(**options):
    return functools.partial(support_process.build, **options)


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
        "from girih.runtime.client.client import CoreClient\n"
        "from girih.runtime.client.supervisor import ProcessTransport\n"
        "from girih.serve.offline.shared_client import SharedClient\n"
        "if __name__ == '__main__':\n"
        "    client = SharedClient(CoreClient(ProcessTransport(support_process.build)))\n"
        "    print(client.start().name)\n"
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
        self.connection = ZmqTransport(address)
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
        front_end.connection.send(AddRequests([make_request(name, max_tokens=200)]))
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
    front_end.connection.send(AddRequests([make_request("a", max_tokens=3)]))
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
