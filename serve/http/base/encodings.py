"""Compressed request bodies, decoded as they arrive and never into more bytes than may come plain.

receive ─▶ pieces as sent ─▶ decompressor, in a worker thread ─▶ pieces of the body
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from girih.serve.http.base.errors import ApiError

MAX_WINDOW_LOG = 23  # of zstd: the 8 MiB that RFC 9659 has senders keep to


class Decompressor(Protocol):
    """One compressed stream, as `zlib` has it."""

    @property
    def eof(self) -> bool:
        """True if its end was seen."""

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Take the next piece; fewer than `max_length` bytes are all that it decodes to."""


class _Brotli:
    unused_data = b""  # the library takes that for damage

    def __init__(self) -> None:
        import brotli

        self._decompressor = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.is_finished())

    def decompress(self, data: bytes, max_length: int) -> bytes:
        decoded: bytes = self._decompressor.process(data, output_buffer_limit=max_length)
        return decoded  # up to twice as much: the library's buffer grows in steps


def _zstd() -> Decompressor:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    limit: Any = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
    return zstd.ZstdDecompressor(options=limit)


def _deflate(first: bytes) -> Decompressor:
    """With zlib's header, as HTTP asks for, or without, as some clients send it."""
    return zlib.decompressobj(zlib.MAX_WBITS if first[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS)


CODINGS: dict[str, Callable[[bytes], Decompressor]] = {
    "gzip": lambda first: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "deflate": _deflate,
    "br": lambda first: _Brotli(),
    "zstd": lambda first: _zstd(),
}
"""Name in `content-encoding` → what makes its decompressor, given the first piece."""


def content_coding(headers: Headers) -> str | None:
    """Return which of `CODINGS` a body has, None for a plain one.

    Raises:
        ApiError: 415, it has another one, or several.
    """
    declared = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if declared in ("", "identity"):
        return None
    coding = "gzip" if declared == "x-gzip" else declared
    if coding in CODINGS:
        return coding
    raise ApiError(
        415,
        f"content-encoding is {declared[:80]!r}; it must be one of {', '.join(CODINGS)}, or left "
        "out for a body that is not compressed",
    )


class DecodedBody:
    """A `receive` that hands on what the pieces of a compressed body decode to.

    A second stream behind the first, which files of gzip may have, is refused: a body could hold
    a million empty ones.

    Args:
        receive: hands on the pieces as they were sent.
        coding: one of `CODINGS`.
        max_bytes: largest decoded body.
    """

    def __init__(self, receive: Receive, coding: str, max_bytes: int) -> None:
        self._receive = receive
        self._coding = coding
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._decompressor: Decompressor | None = None

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            ApiError: 400, the data is damaged or cut off; 413, it decodes to too much.
        """
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        piece = message.get("body", b"")
        if piece:
            piece = await asyncio.to_thread(self._decode, piece)
        decompressor, is_last = self._decompressor, not message.get("more_body", False)
        if is_last and decompressor is not None and not decompressor.eof:
            raise ApiError(400, f"the body ends before its {self._coding} data does")
        return {**message, "body": piece}

    def _decode(self, piece: bytes) -> bytes:
        limit = self._max_bytes - self._num_bytes + 1
        try:
            if self._decompressor is None:
                self._decompressor = CODINGS[self._coding](piece)
            decoded = self._decompressor.decompress(piece, limit)
        except Exception as error:  # each library has a class of its own
            raise ApiError(400, f"the body is not valid {self._coding} data: {error}") from error
        self._num_bytes += len(decoded)
        if self._num_bytes > self._max_bytes:
            raise ApiError(
                413,
                f"the body decodes to more than {self._max_bytes} bytes, the most that this server "
                "takes (serve.max_body_bytes)",
            )
        if self._decompressor.unused_data:
            raise ApiError(400, f"the body goes on behind the end of its {self._coding} data")
        return decoded
