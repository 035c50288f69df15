"""The contract between the scheduler and whatever runs its plans.

    Scheduler ──SchedulerOutput──▶ ModelRunner ──ModelRunnerOutput──▶ Scheduler

The records hold plain Python values only, so that they can cross process borders. No torch here.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.request import TokenLogprobs
from girih.runtime.records.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, frozen=True):
    """A request the runner has no row for: a new one, or a preempted one that comes back.

    Attributes:
        request_id: its id.
        token_ids: every token so far, prompt first (a copy; the runner may keep it).
        num_prompt_tokens: how many of them are the prompt.
        sampling: how tokens are chosen.
        stop_token_ids: ids that must not be sampled before `sampling.min_tokens` output tokens.
        block_ids: its block table, enough for this step's tokens: rows of one KV block per KV
            group, in sequence order; 0 where a group needs none.
        num_computed_tokens: leading tokens whose KV is already in these blocks.
        pooling: the vector that is wanted instead of tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int
    pooling: PoolingParams | None = None


class RunningUpdate(msgspec.Struct, frozen=True, gc=False):
    """News about a request the runner already has a row for.

    Attributes:
        request_id: its id.
        new_block_ids: rows to append to its block table.
        num_computed_tokens: tokens computed before this step.
    """

    request_id: str
    new_block_ids: tuple[int, ...]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The plan of one step; read-only once made.

    The runner first drops the rows of `finished_ids` and `preempted_ids` (ids it does not know
    are ignored), then adds `new_requests`, then applies `running`.

    Attributes:
        step_id: grows by one per plan; the result carries it back.
        new_requests: requests without a row.
        running: requests with a row.
        num_scheduled_tokens: request id -> tokens to compute, in batch order; each request of
            `running` and `new_requests` is here exactly once, with at least one token.
        finished_ids: requests that ended since the last plan.
        preempted_ids: requests that lost their blocks since the last plan.
    """

    step_id: int
    new_requests: tuple[NewRequest, ...]
    running: tuple[RunningUpdate, ...]
    num_scheduled_tokens: dict[str, int]
    finished_ids: tuple[str, ...]
    preempted_ids: tuple[str, ...]

    @property
    def total_tokens(self) -> int:
        """T, the tokens of this step."""
        return sum(self.num_scheduled_tokens.values())


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Where the runner spent one step, in seconds.

    Attributes:
        prepare: rows brought up to date, inputs gathered.
        run: the model.
        sample: tokens chosen and taken in.
    """

    prepare: float
    run: float
    sample: float


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """The result that answers one plan.

    Attributes:
        step_id: of the plan.
        sampled_token_ids: one entry per request whose last known token was in the step.
        logprobs: one list per request that asked, parallel to its sampled tokens.
        prompt_logprobs: per request that asked, one entry for each prompt token that the logits
            of this step predict (the chunks of a prompt add up to all but its first token).
        errors: why requests of the plan failed on their own; each ends with its error.
        pooled: in place of tokens, the vectors of requests whose last token was in the step.
        times: where the time went, when the runner measures it.
        dispatch: how the model ran (captured or not, in which bucket) and why not better.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    errors: dict[str, str] = {}
    pooled: dict[str, bytes] = {}
    times: StepTimes | None = None
    dispatch: str = ""


class ModelRunner(Protocol):
    """Runs plans in the order they were made.

    The order is part of the contract: KV writes of a plan land before a later plan reads or
    writes, so blocks of an aborted request may be handed out while its last plan still runs.
    A runner keeps its own copy of each row's tokens and appends what it samples.
    """

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan and return its result.

        Raises:
            EngineError: the device is lost; the core ends. Any other exception fails all the
                requests of this plan; what is the fault of one is told in `errors` instead.
        """
        ...


@runtime_checkable
class MemoryRunner(Protocol):
    """A runner that can give up its memory and take it back; called between plans."""

    def sleep(self, level: int) -> None:
        """Give up weights and KV cache (level 1), compiled code too (level 2).

        Raises:
            BusyError: its memory is in use by something else.
        """

    def wake(self) -> None:
        """Take everything back.

        Raises:
            GirihError: it cannot be loaded; nothing has changed.
        """

    def reload_weights(self, path: str | None) -> str:
        """Exchange the weights; returns how that went, for the log.

        Raises:
            GirihError: they do not fit; the old ones stay.
        """
