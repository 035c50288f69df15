"""A front end's end of the wire to a core in another process. Not thread-safe, never waits long.

    send(Command) ─▶ DEALER ─▶ core         receive() ─▶ [Message | Disconnected]

When the core's process goes away `receive` says so once; from then on the connection waits for the
next core at the same address, greets it, and the first news of that one is its `Ready`.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from girih.kernels.base.errors import RequestError
from girih.runtime.records.messages import Command, Hello, Message, decode_message, encode

RECONNECT_MS = 50


class Disconnected:
    """The core's process is gone; nothing sent before it will be answered."""


class CoreConnection:
    """Connects to `address`, now or as soon as a core listens there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._connect()

    @property
    def files(self) -> tuple[int, int]:
        """Descriptors that become readable (edge-triggered) when `receive` should be called.

        Sending can swallow an edge: call `receive` after `send` too. They change with a
        `Disconnected`.
        """
        return int(self._socket.fd), int(self._monitor.fd)

    def send(self, command: Command) -> None:
        """Send; while no core listens it is kept for the next one.

        Raises:
            RequestError: a value in it cannot travel (an integer of more than 64 bits, half a
                character).
        """
        try:
            data = encode(command)
        except (OverflowError, TypeError, UnicodeError) as error:
            raise RequestError(
                f"a value cannot be sent to the engine's process: {error}; integers have at most "
                "64 bits, texts are valid Unicode"
            ) from error
        self._socket.send(data, zmq.NOBLOCK)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `receive` has something."""
        return bool(self._poller.poll(int(timeout * 1000)))

    def receive(self) -> list[Message | Disconnected]:
        """Return what came, without waiting."""
        received = self._receive_messages()
        if self._lost_core():
            received += self._receive_messages()  # its last words
            received.append(Disconnected())
            # A new socket: what the old one still holds was meant for the core that is gone.
            self._close_socket()
            self._connect()
        return received

    def close(self) -> None:
        """Close; commands that were just sent still leave."""
        self._close_socket(linger_ms=200)
        self._context.term()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self._address)
        self.send(Hello())

    def _close_socket(self, linger_ms: int = 0) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _receive_messages(self) -> list[Message | Disconnected]:
        received: list[Message | Disconnected] = []
        while True:
            try:
                received.append(decode_message(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return received

    def _lost_core(self) -> bool:
        lost = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            lost = lost or event == zmq.EVENT_DISCONNECTED
        return lost
