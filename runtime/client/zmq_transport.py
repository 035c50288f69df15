"""A front end's end of the wire to a core in another process: a ZMQ DEALER. Never waits long.

    send(Command) ─▶ DEALER ─▶ core         receive() ─▶ [Message | Disconnected | Gone]

When the core's process goes away `receive` says so once; from then on the connection waits for the
next core at the same address, greets it, and the first message of that one is its `Ready`.
"""

from __future__ import annotations

import contextlib
import os
import select

import zmq
from zmq.utils.monitor import recv_monitor_message

from girih.kernels.base.errors import RequestError
from girih.kernels.base.progress import Progress
from girih.runtime.client.transport import Disconnected, Gone, Received
from girih.runtime.records.messages import Command, Hello, decode_message, encode

RECONNECT_MS = 50


class ZmqTransport:
    """Connects to `address`, at once or as soon as a core listens there.

    Args:
        address: where the core listens, e.g. "ipc:///tmp/girih-x/core".
        restarts: whether another core comes when one ends.
    """

    def __init__(self, address: str, restarts: bool = False) -> None:
        self._address = address
        self._restarts = restarts
        self._gone: BaseException | None = None
        self._is_closed = False
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._files = select.epoll()  # one descriptor that stays the same when sockets do not
        self._files.register(self._wake, select.EPOLLIN)
        self._connect()

    def start(self, progress: Progress) -> None:
        """See `Transport.start`: nothing is left to do."""

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._files.fileno()

    def send(self, command: Command) -> None:
        """See `Transport.send`; while no core listens the command is kept for the next one.

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
        os.eventfd_write(self._wake, 1)  # sending may have swallowed what makes the socket readable

    def receive(self) -> list[Received]:
        """See `Transport.receive`."""
        if self._is_closed:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        received = self._receive_messages()
        if self._lost_core():
            received += self._receive_messages()  # its last words
            received.append(Disconnected())
            # A new socket: what the old one still holds was meant for the core that is gone.
            self._close_socket()
            self._connect()
        if self._gone is not None:
            received.append(Gone(self._gone))
        return received

    def wait(self, timeout: float) -> None:
        """See `Transport.wait`."""
        self._poller.poll(int(timeout * 1000))

    def may_come_back(self) -> bool:
        """See `Transport.may_come_back`."""
        return self._restarts

    def is_building(self) -> bool:
        """See `Transport.is_building`: the core's process does, if anybody."""
        return False

    def fail(self, error: BaseException) -> None:
        """Take note that the core is gone for good (from any thread: its supervisor knows)."""
        self._gone = error
        if not self._is_closed:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """See `Transport.close`; commands that were just sent still leave."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_socket(linger_ms=200)
        self._context.term()
        self._files.close()
        os.close(self._wake)

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor):
            self._files.register(int(source.fd), select.EPOLLIN)
            self._poller.register(source, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._socket.connect(self._address)
        self.send(Hello())

    def _close_socket(self, linger_ms: int = 0) -> None:
        for source in (self._socket, self._monitor):
            self._files.unregister(int(source.fd))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _receive_messages(self) -> list[Received]:
        received: list[Received] = []
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
