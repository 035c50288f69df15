"""A third way to a core, over TCP: all that another transport takes is this file."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from typing import Any

from girih.kernels.base.progress import Progress as ProgressObserver
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.client.loop import serve_engine
from girih.runtime.client.transport import Disconnected, Received
from girih.runtime.records.messages import (
    Command,
    Message,
    Progress,
    decode_command,
    decode_message,
    encode,
)

CLIENT = b"tcp"
HEAD = struct.Struct("<I")


class Frames:
    """Length-prefixed records on a socket that is read without waiting."""

    def __init__(self, wire: socket.socket) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire = wire
        self.is_open = True
        self._buffer = bytearray()

    def send(self, data: bytes) -> bool:
        """Send a record; False when the other end is gone."""
        try:
            self.wire.setblocking(True)
            self.wire.sendall(HEAD.pack(len(data)) + data)
        except OSError:
            self.is_open = False
        return self.is_open

    def receive(self) -> list[bytes]:
        """Whole records that came."""
        self.wire.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.is_open:
                try:
                    data = self.wire.recv(1 << 16)
                except ConnectionError:
                    data = b""
                self.is_open = bool(data)
                self._buffer += data
        records = []
        while len(self._buffer) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                break
            records.append(bytes(self._buffer[HEAD.size : HEAD.size + size]))
            del self._buffer[: HEAD.size + size]
        return records


class SocketPort:
    """The core's end; one front end."""

    def __init__(self, wire: socket.socket) -> None:
        self._frames = Frames(wire)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(wire, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, Command]]:
        self._selector.select(timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return [(CLIENT, decode_command(data)) for data in self._frames.receive()]

    def send(self, client: bytes, message: Message) -> bool:
        return self._frames.send(encode(message))

    def broadcast(self, message: Message) -> list[bytes]:
        return [] if self.send(CLIENT, message) else [CLIENT]

    def tell_progress(self, event: ProgressEvent) -> None:
        self.broadcast(Progress.of(event))

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._frames.wire.close()


class SocketTransport:
    """The front end's end; the core runs behind a listening socket, in a thread for once."""

    def __init__(self, build: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wire = socket.create_connection(self._listener.getsockname())
        self._frames = Frames(self._wire)
        self._thread = threading.Thread(target=self._serve, args=(build,), daemon=True)
        self._stop: Any = lambda: None
        self._told = False
        self._is_closed = False

    def start(self, progress: ProgressObserver) -> None:
        self._thread.start()

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, command: Command) -> None:
        self._frames.send(encode(command))

    def receive(self) -> list[Received]:
        if self._is_closed:
            return []
        received: list[Received] = [decode_message(data) for data in self._frames.receive()]
        if not self._frames.is_open and not self._told:
            self._told = True
            received.append(Disconnected())
        return received

    def wait(self, timeout: float) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wire, selectors.EVENT_READ)
        selector.select(timeout)

    def may_come_back(self) -> bool:
        return False

    def is_building(self) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._stop()
            self._thread.join(10)
            self._wire.close()
            self._listener.close()

    def _serve(self, build: Any) -> None:
        port = SocketPort(self._listener.accept()[0])
        with contextlib.suppress(BaseException):
            serve_engine(build, port, self._on_ready)
        port.close()

    def _on_ready(self, loop: Any) -> None:
        self._stop = loop.stop
