"""uvicorn's HTTP connection with a bound on what it bounds nowhere: the head of a request.

    connected ─▶ head: HEAD_BYTES, `head_seconds` ─▶ body: see `middleware.py` ─▶ answer ─╮
        ▲                                                                                    │
        ╰── idle: uvicorn's keep-alive ◀─────────────────────────────────────────────────────╯

The parser gathers a header however long it grows, copying it at every read, so that without a
limit one client could hold the event loop and the memory of all. What stands between and behind
the chunks of a body (sizes, trailers) is limited in the same way.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from girih.serve.http.base.errors import ApiError

HEAD_BYTES = 64 * 1024  # what is larger by one read (256 KiB) may pass


class HttpConnection(HttpToolsProtocol):
    """One client's connection.

    Attributes:
        head_seconds: how long the head of a request may take, and the first byte of all.
    """

    head_seconds = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self._is_in_message = False
        self._is_in_head = False
        self._is_refused = False  # nothing more is read
        self._num_bytes = 0  # since the request before ended, or a part of the body came
        self._head_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was left."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and count it unless it belongs to a body."""
        if self._is_refused:
            return
        if not self._is_in_message:
            self._expect_head()
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_message and self._num_bytes > HEAD_BYTES:
            part = "head" if self._is_in_head else "framing"
            self._refuse(431, f"the request's {part} has more than {HEAD_BYTES} bytes")

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_in_message = self._is_in_head = True
        self._expect_head()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body; how much may come is not this object's business."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._is_in_message = False
        self._num_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of every other error."""
        self._refuse(400, "the request is not valid HTTP")

    # ---- limits ----

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():  # an earlier request of this connection: let it end
            self._expect_head()
        elif self._is_in_head:
            self._refuse(408, f"the request's head did not arrive in {self.head_seconds:g} s")
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless an answer is under way, and close."""
        self._is_refused = True
        self._stop_timer()
        is_answering = self._is_answering()
        if is_answering and not self.cycle.more_body:
            self.cycle.keep_alive = False  # what came whole before gets its answer first
            return
        if self.transport.is_closing():
            return
        if not is_answering or not self.cycle.response_started:
            body = msgspec.json.encode(ApiError(status, message).body())
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def connection_type(head_seconds: float) -> type[HttpConnection]:
    """The connection class of a server, which uvicorn makes the objects of."""
    return type("HttpConnection", (HttpConnection,), {"head_seconds": head_seconds})
