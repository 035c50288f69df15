"""A core in another process, as the event loop sees it: how long it has been stuck."""

import asyncio

import pytest

from girih.runtime.client.core_endpoint import CoreEndpoint
from girih.runtime.records.messages import Alive, Answer, EngineFacts, Outputs, Ready
from girih.serve.engine.process_link import ProcessLink

FACTS = EngineFacts(name="m", key="k", model_path="", max_model_len=8, vocab_size=8)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/core"


async def heard(link, endpoint, message):
    """Send a message, and another whose arrival shows that both were dealt with."""
    [client] = endpoint.clients
    endpoint.send(client, message)
    call = asyncio.ensure_future(link.call("stats"))
    await asyncio.sleep(0)
    [(_, command)] = await asyncio.to_thread(endpoint.receive, 20)
    endpoint.send(client, Answer(command.call_id))
    await call


def test_only_a_result_or_a_sign_of_life_ends_a_stuck_step(address):
    async def scenario():
        endpoint = CoreEndpoint(address)
        link = ProcessLink(address)
        try:
            await asyncio.to_thread(endpoint.receive, 20)
            endpoint.broadcast(Ready(FACTS))
            await link.ready()
            await heard(link, endpoint, Alive(100.0))
            assert link.seconds_stuck() >= 100  # though an answer came after it
            await heard(link, endpoint, Alive(0.0))
            assert link.seconds_stuck() < 50
            await heard(link, endpoint, Alive(100.0))
            await heard(link, endpoint, Outputs([]))
            assert link.seconds_stuck() < 50
        finally:
            link.close()
            endpoint.close()

    asyncio.run(scenario())
