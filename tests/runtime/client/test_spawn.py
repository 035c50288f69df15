"""A core's process that is on its way before anybody knows what it is to build."""

import functools
import multiprocessing

import support_process
from support_process import alive, wait_for

from girih.runtime.client.spawn import core_ahead, spawn_core
from girih.runtime.client.supervisor import CoreSupervisor
from girih.runtime.client.zmq_transport import ZmqTransport
from girih.runtime.records.messages import Ready


def test_a_core_that_is_ahead_builds_what_it_is_told():
    errors = []
    with core_ahead() as ahead:
        build = functools.partial(support_process.build)
        supervisor = CoreSupervisor(build, False, errors.append, ahead)
        supervisor.start()
        assert supervisor.pid == ahead.process.pid
    assert alive(ahead.process.pid), "its supervisor owns it now"
    connection = ZmqTransport(supervisor.address)

    def is_ready():
        connection.wait(0.01)
        return any(isinstance(message, Ready) for message in connection.receive())

    try:
        wait_for(is_ready)
    finally:
        connection.close()
        supervisor.stop()
    assert not alive(ahead.process.pid)
    assert errors == []


def test_a_core_that_nobody_wants_ends():
    with core_ahead() as ahead:
        assert alive(ahead.process.pid)
    assert not alive(ahead.process.pid)


def test_a_core_that_died_before_it_was_told_is_reported():
    errors = []
    ahead = spawn_core()
    ahead.process.kill()
    ahead.process.join()
    supervisor = CoreSupervisor(support_process.build, False, errors.append, ahead)
    supervisor.start()
    wait_for(lambda: errors)
    assert "code -9" in str(errors[0])
    supervisor.stop()


def test_a_core_whose_front_end_was_killed_ends(tmp_path):
    file = tmp_path / "pid"
    process = multiprocessing.get_context("spawn").Process(
        target=support_process.leave_a_core_waiting, args=(str(file),)
    )
    process.start()
    wait_for(lambda: file.exists() and file.read_text())
    core = int(file.read_text())
    assert alive(core)
    process.kill()
    process.join()
    wait_for(lambda: not alive(core))
