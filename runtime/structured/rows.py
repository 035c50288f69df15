"""The runner's side: a matcher per running request, and the masks of one step.

A matcher's state is a function of the output tokens. A request that comes back after a preemption
brings its tokens along, so its matcher is simply made anew; results that were dropped meanwhile
leave no trace.
"""

from __future__ import annotations

import numpy as np
import torch

from girih.kernels.errors import RequestError
from girih.runtime.executor import NewRequest, SchedulerOutput
from girih.runtime.structured.backend import Backend, Mask, Matcher
from girih.runtime.structured.output import StructuredOutput
from girih.runtime.structured.store import GrammarStore

Constraint = tuple[torch.Tensor, torch.Tensor]
"""Rows int64 [G] of the logits, and int32 [G, ceil(V / 32)] with a bit per token."""


class GrammarRows:
    """Matchers of the requests that have a row in the batch.

    Args:
        store: makes matchers.
        vocab_size: V, the width of the logits.
    """

    def __init__(self, store: GrammarStore, vocab_size: int) -> None:
        self._store = store
        self._num_words = -(-vocab_size // 32)
        self._matchers: dict[str, Matcher] = {}
        self._errors: dict[str, str] = {}  # requests whose matcher cannot go on

    def __len__(self) -> int:
        return len(self._matchers) + len(self._errors)

    def update(self, plan: SchedulerOutput) -> None:
        """Drop and add matchers as the plan says."""
        if len(self):
            for request_id in (*plan.finished_ids, *plan.preempted_ids):
                self._matchers.pop(request_id, None)
                self._errors.pop(request_id, None)
        for request in plan.new_requests:
            if request.sampling.structured is not None:
                self._start(request, request.sampling.structured)

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

    def accept(self, sampled_ids: list[str], token_ids: torch.Tensor) -> dict[str, str]:
        """Move the matchers on; returns the requests that cannot go on, with the reason.

        Args:
            sampled_ids: as in `constrain`.
            token_ids: int64 [S], the token each got.
        """
        if not len(self):
            return {}
        for request_id, token_id in zip(sampled_ids, token_ids.tolist(), strict=True):
            matcher = self._matchers.get(request_id)
            if matcher is not None and not matcher.is_stopped:
                self._advance(request_id, matcher, token_id)
        return {i: self._errors[i] for i in sampled_ids if i in self._errors}

    def _start(self, request: NewRequest, structured: StructuredOutput) -> None:
        try:
            matcher = self._store.matcher(structured)
        except RequestError as error:
            self._errors[request.request_id] = str(error)
            return
        self._matchers[request.request_id] = matcher
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            if request.request_id in self._matchers:
                self._advance(request.request_id, matcher, token_id)

    def _advance(self, request_id: str, matcher: Matcher, token_id: int) -> None:
        try:
            if matcher.accept(token_id):
                return
            reason = matcher.error or f"token {token_id} is not allowed"
        except Exception as error:  # the library raises what it likes
            reason = f"{type(error).__name__}: {error}"[:300]
        self._errors[request_id] = f"the output cannot keep its form: {reason}"
        self._matchers.pop(request_id, None)
