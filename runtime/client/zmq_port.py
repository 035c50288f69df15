"""The core's end of the wire: a ZMQ ROUTER that many front ends connect to.

    front end A (DEALER) ─╮
    front end B (DEALER) ─┴─▶ ROUTER ─ receive ─▶ [(client, Command)]
                          ◀───────── send(client, Message); False: it is gone

A front end that went away is noticed when something is sent to it.
"""

from __future__ import annotations

import contextlib
import logging
import os

import zmq

from girih.kernels.base.progress import ProgressEvent
from girih.runtime.records.messages import (
    Command,
    Hello,
    Message,
    Progress,
    decode_command,
    encode,
    refusals_of,
)

logger = logging.getLogger(__name__)

SEND_LIMIT = 65536  # messages queued for a front end that does not read; then it counts as gone
LINGER_MS = 1000


class ZmqPort:
    """Listens on `address`.

    Args:
        address: where, e.g. "ipc:///tmp/girih-x/core".

    Attributes:
        clients: front ends that said hello and are not known to be gone.
    """

    def __init__(self, address: str) -> None:
        self.clients: dict[bytes, None] = {}
        self._stages: dict[str, Progress] = {}  # the last of each stage of building
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.bind(address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def wake(self) -> None:
        """End a running `receive` (from any thread)."""
        os.eventfd_write(self._wake, 1)

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, Command]]:
        """Return what came; waits up to `timeout` seconds for something, or for `wake`."""
        self._poller.poll(int(timeout * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        received: list[tuple[bytes, Command]] = []
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            command = self._read(client, data)
            if isinstance(command, Hello):
                self.clients[client] = None
            if command is not None:
                received.append((client, command))

    def _read(self, client: bytes, data: bytes) -> Command | None:
        """The command in `data`; None when there is none, and its sender is told."""
        try:
            return decode_command(data)
        except Exception as error:  # a front end may send anything; the core serves the others on
            logger.error("a command cannot be read: %s", error)
            for answer in refusals_of(data, error):
                self.send(client, answer)
        return None

    def send(self, client: bytes, message: Message) -> bool:
        """Send without waiting; False when the front end is gone or does not read."""
        try:
            self._socket.send_multipart((client, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.clients.pop(client, None)
            return False
        return True

    def broadcast(self, message: Message) -> list[bytes]:
        """Send to every front end; returns those that are gone."""
        return [client for client in list(self.clients) if not self.send(client, message)]

    def tell_progress(self, event: ProgressEvent) -> None:
        """Take in greetings and tell everybody how far building is, newcomers from its start."""
        before = set(self.clients)
        self.receive()
        for newcomer in self.clients.keys() - before:
            for earlier in self._stages.values():
                self.send(newcomer, earlier)
        progress = Progress.of(event)
        self._stages[event.stage] = progress
        self.broadcast(progress)

    def close(self) -> None:
        """Send what is queued for a moment, then close."""
        self._socket.close()
        self._context.term()
        os.close(self._wake)
