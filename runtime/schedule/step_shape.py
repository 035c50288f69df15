"""The shape of a step, read off its plan, that determines how long it takes. No torch.

one token on top of context c:     decode_context += c + 1
q tokens on top of context c:      prefill_pairs  += c + 1 + … + c + q
"""

from __future__ import annotations

import msgspec

from girih.runtime.records.plans import NewRequest, RunningUpdate, SchedulerOutput


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """The size of one step.

    Attributes:
        tokens: T, computed in this step.
        requests: that take part.
        decode_context: keys read by requests with one token, together.
        prefill_pairs: (query, key) pairs of requests with several tokens, together.
    """

    tokens: int
    requests: int
    decode_context: int
    prefill_pairs: int


def shape_of(plan: SchedulerOutput) -> StepShape:
    """The shape of `plan`."""
    scheduled = plan.num_scheduled_tokens
    decode_context = prefill_pairs = tokens = 0
    rows: tuple[RunningUpdate | NewRequest, ...] = (*plan.running, *plan.new_requests)
    for row in rows:
        count, before = scheduled[row.request_id], row.num_computed_tokens
        tokens += count
        if count == 1:
            decode_context += before + 1
        else:
            prefill_pairs += count * before + count * (count + 1) // 2
    return StepShape(tokens, len(scheduled), decode_context, prefill_pairs)
