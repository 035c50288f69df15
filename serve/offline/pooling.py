"""Runs a set of texts to their vectors on a core that others may use as well."""

from __future__ import annotations

import time
from collections.abc import Sequence

from girih.kernels.base.errors import EngineError
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.serve.offline.shared_client import SharedClient
from girih.serve.text.texts import PooledText


def run_texts(
    client: SharedClient, texts: Sequence[PooledText], names: Sequence[str]
) -> list[EngineOutput]:
    """Hand texts to the core together and step until each has its vector.

    Args:
        client: the way to the core.
        texts: what to compute.
        names: a request id for each.

    Raises:
        RequestError: a text cannot be served.
        EngineError: one failed.
    """
    found: dict[str, EngineOutput] = {}
    try:
        outputs = client.submit(
            [
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=text.token_ids,
                    pooling=text.params,
                    arrival_time=time.monotonic(),
                )
                for name, text in zip(names, texts, strict=True)
            ]
        )
        while len(found) < len(names):
            found.update((output.request_id, output) for output in client.wait(outputs))
    finally:
        missing = [name for name in names if name not in found]
        if missing:
            client.abort(missing)
    for name in names:
        if found[name].pooled is None:
            raise EngineError(f"request {name} failed: {found[name].error}")
    return [found[name] for name in names]
