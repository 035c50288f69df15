"""How long a core has been stuck, as its client sees it."""

import pytest

from girih.runtime.client.client import CoreClient
from girih.runtime.client.zmq_port import ZmqPort
from girih.runtime.client.zmq_transport import ZmqTransport
from girih.runtime.records.messages import Alive, Answer, EngineFacts, Outputs, Ready

FACTS = EngineFacts(name="m", key="k", model_path="", max_model_len=8, vocab_size=8)


@pytest.fixture
def ends(tmp_path):
    """(the core's end, a client that is ready)."""
    address = f"ipc://{tmp_path}/core"
    port, client = ZmqPort(address), CoreClient(ZmqTransport(address))
    port.receive(20)
    port.broadcast(Ready(FACTS))
    receive_until(client, client.ready)
    yield port, client
    client.close()
    port.close()


def receive_until(client, future):
    while not future.done():
        client.wait(20)
        client.poll()


def tell(ends, message):
    """Send a message, and another whose arrival shows that both were dealt with."""
    port, client = ends
    port.broadcast(message)
    answer = client.call("stats")
    [(name, command)] = port.receive(20)
    port.send(name, Answer(command.call_id))
    receive_until(client, answer)


def test_only_a_result_or_a_sign_of_life_ends_a_stuck_step(ends):
    client = ends[1]
    tell(ends, Alive(100.0))
    assert client.seconds_stuck() >= 100  # though an answer came after it
    tell(ends, Alive(0.0))
    assert client.seconds_stuck() < 50
    tell(ends, Alive(100.0))
    tell(ends, Outputs([]))
    assert client.seconds_stuck() < 50
