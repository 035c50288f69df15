"""Links of the OpenAPI document: which operation may follow an answer, with what of it."""

from __future__ import annotations

from typing import Any

_RESPONSE = "/v1/responses/{response_id}"
_ID = {"response_id": "$response.body#/id"}


def operation_id(route: str) -> str:
    """The id of an operation ("GET /path") in the document."""
    return route.lower().replace("/", "_").replace(" ", "")


def _link(route: str, description: str, **how: Any) -> dict[str, Any]:
    return {"operationId": operation_id(route), "description": description, **how}


_OF_A_RESPONSE: dict[str, dict[str, Any]] = {
    "read": _link(f"GET {_RESPONSE}", "The response as it is now.", parameters=_ID),
    "items": _link(f"GET {_RESPONSE}/input_items", "What it answers.", parameters=_ID),
    "cancel": _link(f"POST {_RESPONSE}/cancel", "End it, if `background` is true.", parameters=_ID),
    "forget": _link(f"DELETE {_RESPONSE}", "Forget it.", parameters=_ID),
}
_TOKENS = "$response.body#/tokens"


def _of_tokens(prefix: str) -> dict[str, dict[str, Any]]:
    return {
        "text": _link(
            f"POST {prefix}/detokenize", "The text again.", requestBody={"tokens": _TOKENS}
        ),
        "generate": _link(
            "POST /inference/v1/generate",
            "Go on from these tokens.",
            requestBody={"token_ids": _TOKENS},
        ),
    }


LINKS: dict[str, dict[str, dict[str, Any]]] = {
    "POST /v1/responses": _OF_A_RESPONSE,
    f"GET {_RESPONSE}": {name: _OF_A_RESPONSE[name] for name in ("items", "cancel", "forget")},
    "GET /v1/models": {
        "details": _link(
            "GET /v1/models/{name}",
            "Limits and defaults of the model.",
            parameters={"name": "$response.body#/data/0/id"},
        )
    },
    "POST /tokenize": _of_tokens(""),
    "POST /v1/tokenize": _of_tokens("/v1"),
}
"""Route → name → what may follow its answer."""
