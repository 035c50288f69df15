"""Responses kept for later turns: in memory, bounded in number and in bytes."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from girih.serve.http.base.errors import ApiError


@dataclass(frozen=True)
class StoredResponse:
    """One turn.

    Attributes:
        body: the response object.
        input_items: what the request gave as input.
        messages: the conversation up to and with this answer, without instructions; None while
            there is no answer to go on from.
    """

    body: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]] | None


class ResponseStore:
    """The most recently used responses.

    Args:
        max_responses: how many are kept; 0 keeps none.
        max_bytes: how large all of them together may be, as JSON.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """True if responses are kept at all."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._kept)

    def free_id(self, response_id: str) -> str:
        """`response_id`, made longer when a response is kept under it already."""
        found = response_id
        while found in self._kept:
            found = f"{response_id}-{uuid.uuid4().hex[:8]}"
        return found

    def put(self, response: StoredResponse) -> None:
        """Keep a response; the ones not used for longest make room."""
        response_id = response.body["id"]
        size = len(msgspec.json.encode([response.body, response.input_items, response.messages]))
        self._drop(response_id)
        self._kept[response_id] = (response, size)
        self._num_bytes += size
        while self._kept and (
            len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes
        ):
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response.

        Args:
            response_id: its id.
            param: the request field that named it.

        Raises:
            ApiError: 404, it is not kept (any more).
        """
        kept = self._kept.get(response_id)
        if kept is None:
            raise ApiError(
                404,
                f"no response {response_id[:80]!r} is stored; this server keeps the "
                f"{self._max_responses} most recently used ones in memory",
                param,
                "response_not_found",
            )
        self._kept.move_to_end(response_id)
        return kept[0]

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404, it is not kept.
        """
        self.get(response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        _, size = self._kept.pop(response_id, (None, 0))
        self._num_bytes -= size
