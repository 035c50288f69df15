"""The runner's side: a matcher per running request, and the masks of one step.

A matcher's state is a function of the output tokens. A request that comes back after a preemption
brings its tokens along, so its matcher is simply made anew; results that were dropped meanwhile
leave no trace. A request whose output cannot keep its form has failed.
"""

from __future__ import annotations

import numpy as np
import torch

from girih.kernels.base.errors import GirihError
from girih.runtime.isolation import RowFailures, describe
from girih.runtime.records.plans import NewRequest, SchedulerOutput
from girih.runtime.structured.backend import Backend, Mask, Matcher
from girih.runtime.structured.store import GrammarStore

Constraint = tuple[torch.Tensor, torch.Tensor]
"""Rows int64 [G] of the logits, and int32 [G, ceil(V / 32)] with a bit per token."""


class GrammarRows:
    """Matchers of the requests that have a row in the batch.

    Args:
        store: makes matchers.
        vocab_size: V, the width of the logits.
        failures: of the batch.
    """

    def __init__(self, store: GrammarStore, vocab_size: int, failures: RowFailures) -> None:
        self._store = store
        self._num_words = -(-vocab_size // 32)
        self._failures = failures
        self._matchers: dict[str, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def update(self, plan: SchedulerOutput) -> None:
        """Drop and add matchers as the plan says."""
        if len(self):
            for request_id in (*plan.finished_ids, *plan.preempted_ids):
                self._matchers.pop(request_id, None)
        new = plan.new_requests
        self._failures.each(((request.request_id, request) for request in new), self._start)

    def constrain(self, sampled_ids: list[str]) -> Constraint | None:
        """Masks for the rows a step samples from; None when no row has a grammar.

        Args:
            sampled_ids: requests in the order of their logits.
        """
        if not self._matchers:
            return None
        places: list[int] = []
        by_backend: dict[Backend, tuple[list[Matcher], list[int]]] = {}
        for place, request_id in enumerate(sampled_ids):
            matcher = self._matchers.get(request_id)
            if matcher is None or matcher.is_stopped:
                continue
            matchers, rows = by_backend.setdefault(matcher.backend, ([], []))
            matchers.append(matcher)
            rows.append(len(places))
            places.append(place)
        if not places:
            return None
        mask: Mask = np.empty((len(places), self._num_words), np.int32)
        for backend, (matchers, rows) in by_backend.items():
            backend.fill(matchers, rows, mask)
        return torch.tensor(places), torch.from_numpy(mask)

    def accept(self, sampled_ids: list[str], token_ids: torch.Tensor) -> None:
        """Move the matchers on.

        Args:
            sampled_ids: as in `constrain`.
            token_ids: int64 [S], the token each got.
        """
        if not self._matchers:
            return
        tokens = zip(sampled_ids, token_ids.tolist(), strict=True)
        self._failures.each(
            ((pair[0], pair) for pair in tokens if pair[0] in self._matchers),
            lambda pair: _advance(self._matchers[pair[0]], pair[1]),
        )

    def _start(self, request: NewRequest) -> None:
        if request.sampling.structured is None:
            return
        matcher = self._store.matcher(request.sampling.structured)
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            _advance(matcher, token_id)
        self._matchers[request.request_id] = matcher


def _advance(matcher: Matcher, token_id: int) -> None:
    """Take a token; one after the end is not looked at.

    Raises:
        GirihError: the output cannot keep its form.
    """
    if matcher.is_stopped:
        return
    try:
        reason = "" if matcher.accept(token_id) else matcher.error or f"no {token_id} is allowed"
    except Exception as error:  # the library raises what it likes
        reason = describe(error)[:300]
    if reason:
        raise GirihError(f"the output cannot keep its form: {reason}")
