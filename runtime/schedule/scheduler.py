"""Decides which tokens each step computes, and processes the outputs.

There is no prefill phase and no decode phase. Every request has a debt of tokens whose KV is
missing; a step pays debts until its budget is spent: running requests first, in order, then
waiting ones unless this step had to preempt.

    blocked ──▶ waiting ──admit──▶ running ──finish──▶ (gone)
                   ▲                  │
                   ╰────preempt───────╯   blocks freed, num_computed_tokens = 0, output tokens stay

A request is blocked while it waits for a grammar (see `PendingGrammars`); other requests go on.

A plan moves `num_computed_tokens` forward at once (optimistic), so the next plan may be made
before the result is there; results are paired with plans by `step_id`, in order. Void results
(the request was preempted or ended meanwhile) are recognised by `Request.epoch`.
Owns requests. Knows no tensors (no torch) and no text.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable

from girih.kernels.base.errors import EngineError, QueueFullError, RequestError
from girih.runtime.isolation import describe, each
from girih.runtime.records.config import SchedulerConfig
from girih.runtime.records.plans import (
    ModelRunnerOutput,
    NewRequest,
    RunningUpdate,
    SchedulerOutput,
)
from girih.runtime.records.request import EngineOutput, EngineRequest, Request, RequestStatus
from girih.runtime.schedule.admission import AdmissionLimits
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.pending_grammars import NoPendingGrammars, PendingGrammars
from girih.runtime.schedule.plan_draft import PlanDraft, PlanInFlight, PlannedTokens
from girih.runtime.schedule.prefill_budget import PrefillBudget
from girih.runtime.schedule.waiting_queue import make_waiting_queue

logger = logging.getLogger(__name__)

WATERMARK_SHARE = 0.01  # of the blocks stay free for growth when something already runs


class Scheduler:
    """Owner of all unfinished requests.

    Args:
        config: budgets and policy.
        kv_cache: gives and takes back blocks.
        max_model_len: longest prompt + output, in tokens.
        pending_grammars: what requests wait for before they are queued.
        task: what the model is for.

    Attributes:
        num_preemptions: how often a request lost its blocks.
        num_prompt_tokens: prompt tokens of requests admitted so far.
        num_generated_tokens: output tokens so far.
        finished: finish reason -> how many requests ended so.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        pending_grammars: PendingGrammars | None = None,
        task: str = "generate",
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.limits = AdmissionLimits(config, max_model_len, kv_cache.capacity_tokens, task)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.pending_grammars = pending_grammars or NoPendingGrammars()
        self.blocked: dict[str, Request] = {}
        self.waiting = make_waiting_queue(config.policy)
        self.prefill_budget = PrefillBudget(config.target_step_ms)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self._watermark = max(1, int(kv_cache.pool.num_usable * WATERMARK_SHARE))
        self._in_flight: OrderedDict[int, PlanInFlight] = OrderedDict()
        self._next_step_id = 0
        self._next_sequence = 0
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []

    @property
    def num_in_flight(self) -> int:
        """Plans whose result has not come yet."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self.waiting) + len(self.blocked)

    def has_work(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.requests)

    def add_request(self, source: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served as it stands, or its id is taken.
            QueueFullError: `max_num_waiting` requests wait already.
        """
        if source.request_id in self.requests:
            raise RequestError(
                f"request id {source.request_id!r} belongs to an unfinished request; "
                "use another one",
                param="request_id",
            )
        max_total_tokens = self.limits.max_total_tokens(source)
        self._check_queue(len(source.prompt_token_ids))
        request = Request(source, self._next_sequence, max_total_tokens)
        self.kv_cache.hash_prompt(request)
        request.pending_grammar = self.pending_grammars.start(request.sampling)
        self._next_sequence += 1  # nothing is kept of a request that failed up to here
        self.requests[request.request_id] = request
        if request.must_wait:
            request.status = RequestStatus.BLOCKED
            self.blocked[request.request_id] = request
        else:
            self.waiting.add(request)

    def _check_queue(self, num_tokens: int) -> None:
        """Raise `QueueFullError` when a prompt of `num_tokens` may not be queued now."""
        limit = self.config.max_num_waiting
        if limit and self.num_waiting >= limit:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, scheduler.max_num_waiting is {limit}: "
                "try again later",
                reason="max_num_waiting",
            )
        limit = self.config.max_waiting_tokens
        if not limit or not self.num_waiting:
            return
        waiting = self.requests.values()
        queued = sum(r.num_tokens for r in waiting if r.status is not RequestStatus.RUNNING)
        if queued + num_tokens > limit:
            raise QueueFullError(
                f"{queued} prompt tokens wait and the prompt has {num_tokens}; "
                f"scheduler.max_waiting_tokens is {limit}: try again later",
                reason="max_waiting_tokens",
            )

    # ---- planning ----

    def schedule(self) -> SchedulerOutput | None:
        """Make the plan of the next step; None when no request can advance now."""
        if self.blocked:
            self._unblock()
        draft = PlanDraft(self.config.max_num_batched_tokens, self._prompt_budget())
        self._schedule_running(draft)
        if not draft.has_preempted:
            self._schedule_waiting(draft)
        if not draft.parts:
            return None
        plan = SchedulerOutput(
            step_id=self._next_step_id,
            new_requests=tuple(draft.new_requests),
            running=tuple(draft.updates.values()),
            num_scheduled_tokens={
                request_id: part.end - part.start for request_id, part in draft.parts.items()
            },
            finished_ids=tuple(self._finished_ids),
            preempted_ids=tuple(self._preempted_ids),
        )
        self._in_flight[plan.step_id] = PlanInFlight(plan, list(draft.parts.values()))
        self._next_step_id += 1
        self._finished_ids.clear()
        self._preempted_ids.clear()
        return plan

    def _unblock(self) -> None:
        ready = [request for request in self.blocked.values() if not request.must_wait]
        for request in ready:
            del self.blocked[request.request_id]
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def _schedule_running(self, draft: PlanDraft) -> None:
        running = self.running
        index = 0
        while index < len(running) and draft.budget > 0:
            request = running[index]
            num_tokens = self._num_tokens_to_plan(request, draft)
            if (
                num_tokens == 0
            ):  # all it may still get is in flight, or prompts have had their share
                index += 1
                continue
            start = request.num_computed_tokens
            block_ids = self.kv_cache.allocate_slots(request, start + num_tokens)
            if block_ids is None:
                index = self._make_room(index, draft)
                continue
            draft.add(request, num_tokens)
            draft.updates[request.request_id] = RunningUpdate(request.request_id, block_ids, start)
            index += 1

    def _prompt_budget(self) -> int:
        """Prompt tokens of the next step; no limit while no answer waits for the step."""
        config = self.config
        most = config.max_num_batched_tokens
        is_limited = config.target_step_ms and config.enable_chunked_prefill
        if not is_limited or not self._is_answering():
            return most
        return self.prefill_budget.tokens(most)

    def _is_answering(self) -> bool:
        return any(request.is_answering for request in self.running)

    def _num_tokens_to_plan(self, request: Request, draft: PlanDraft) -> int:
        num_known = len(request.token_ids) + request.num_placeholders
        if num_known >= request.max_total_tokens:
            return 0
        debt = num_known - request.num_computed_tokens
        if debt == 1:  # decode
            return 1
        return self._num_prompt_tokens(debt, draft)

    def _num_prompt_tokens(self, debt: int, draft: PlanDraft) -> int:
        """Tokens that a prompt which lacks `debt` gets in this step."""
        num_tokens = min(debt, draft.budget, draft.prompt_budget)
        threshold = self.config.long_prefill_token_threshold
        if not 0 < threshold < num_tokens or not self.config.enable_chunked_prefill:
            return num_tokens
        return threshold if self._is_answering() else num_tokens

    def _make_room(self, index: int, draft: PlanDraft) -> int:
        """Preempt one request for `running[index]`; returns the index to go on with."""
        victim_index = len(self.running) - 1
        if self.config.policy == "priority":
            victim_index = max(range(len(self.running)), key=lambda i: self.running[i].sort_key())
        victim = self.running.pop(victim_index)
        draft.take_out(victim)
        draft.has_preempted = True
        self._preempt(victim)
        return index - 1 if victim_index < index else index

    def _preempt(self, request: Request) -> None:
        """Free the blocks of a request just taken from `running` and queue it again."""
        self.kv_cache.free(request)
        request.epoch += 1
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.num_preemptions += 1
        if request.num_output_tokens == 0:
            request.restart_prompt_logprobs()
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self.waiting.add_preempted(request)

    def _schedule_waiting(self, draft: PlanDraft) -> None:
        max_num_seqs = self.config.max_num_seqs
        while len(self.waiting) and len(self.running) < max_num_seqs:
            if draft.budget <= 0 or draft.prompt_budget <= 0:
                break
            request = self.waiting.peek()
            hit = self.kv_cache.get_computed_blocks(request)
            num_found = hit.num_tokens
            debt = request.num_tokens - num_found
            if self._must_wait_for_budget(debt, draft.budget):
                break
            num_reserved = self._watermark if self.running else 0
            if not self.kv_cache.can_admit(request, hit, num_reserved):
                break
            num_tokens = self._num_prompt_tokens(debt, draft)
            self.waiting.remove(request)
            self.kv_cache.admit(request, hit)
            if self.kv_cache.allocate_slots(request, num_found + num_tokens) is None:
                raise EngineError(
                    f"no KV blocks for {request.request_id!r} after they were counted"
                )
            self._start(request, num_found)
            draft.add(request, num_tokens)
            draft.new_requests.append(self._describe(request, num_found))

    def _must_wait_for_budget(self, debt: int, budget: int) -> bool:
        """Without chunked prefill a prompt waits for a step that takes it whole.

        A preempted request may have grown past the budget of any step; it is computed in chunks.
        """
        whole_step = self.config.max_num_batched_tokens
        return not self.config.enable_chunked_prefill and budget < debt <= whole_step

    def _start(self, request: Request, num_found: int) -> None:
        if request.num_preemptions == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            request.num_cached_tokens = num_found
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_found
        self.running.append(request)

    def _describe(self, request: Request, num_computed_tokens: int) -> NewRequest:
        return NewRequest(
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            stop_token_ids=tuple(sorted(request.stop_ids)),
            block_ids=[block.block_id for block in request.blocks],
            num_computed_tokens=num_computed_tokens,
            pooling=request.pooling,
        )

    # ---- results ----

    def learn_step_time(self, plan: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step was in the runner, for the prompt tokens of later ones."""
        if not self.config.target_step_ms:
            return
        counts = plan.num_scheduled_tokens.values()
        num_prompt_tokens = sum(count for count in counts if count > 1)
        num_answers = sum(count == 1 for count in counts)
        self.prefill_budget.learn(num_prompt_tokens, num_answers, seconds)

    def update(self, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Digest the result of the oldest plan in flight; one record per request with news.

        A request that the result has an error for, or misses the token of, ends with finish reason
        "error", and so does one whose output cannot be processed.

        Raises:
            EngineError: the result answers another plan (nothing has changed then).
        """
        parts = self._take_in_flight(result.step_id)
        num_unfinished = len(self.requests)
        outputs: list[EngineOutput] = []

        def process(part: PlannedTokens) -> None:
            output = self._process_output(part, result)
            if output is not None:
                outputs.append(output)

        def fail(part: PlannedTokens, error: Exception) -> None:
            request_id = part.request.request_id
            logger.error("the result of request %s is lost", request_id, exc_info=error)
            outputs.append(self._end_without_news(part.request, describe(error)))

        # Those of an older epoch were preempted or ended meanwhile: late results.
        each((part for part in parts if part.request.epoch == part.epoch), process, fail)
        if len(self.requests) != num_unfinished:
            self._drop_finished_from_running()
        return outputs

    def _process_output(
        self, part: PlannedTokens, result: ModelRunnerOutput
    ) -> EngineOutput | None:
        """Take in what one request got; its record, if there is news."""
        request, _, _, end, samples = part
        error = result.errors.get(request.request_id)
        if error is not None:
            return self._end_without_news(request, error)
        if end >= request.kv_due:
            self.kv_cache.take_in(request, end)
        if request.sampling.prompt_logprobs is not None:
            self._collect_prompt_logprobs(request, result)
        if not samples:
            return None
        if request.pooling is not None:
            return self._take_pooled(request, result)
        return self._append_sampled(request, result)

    def _take_in_flight(self, step_id: int) -> list[PlannedTokens]:
        expected = next(iter(self._in_flight), None)
        if step_id != expected:
            raise EngineError(
                f"a result for step {step_id} came; the oldest plan in flight is {expected}"
            )
        return self._in_flight.pop(step_id).parts

    def _append_sampled(self, request: Request, result: ModelRunnerOutput) -> EngineOutput:
        request_id = request.request_id
        sampled = result.sampled_token_ids.get(request_id)
        if not sampled:
            return self._end_without_news(request, f"step {result.step_id} gave no token")
        output = EngineOutput(request_id=request_id, num_cached_tokens=request.num_cached_tokens)
        if len(request.token_ids) == request.num_prompt_tokens:
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if request.sampling.scores_only:
            self._finish(request, "length")
            output.finish_reason = "length"
            return output
        request.num_placeholders -= 1
        reason, num_taken = self._take_tokens(request, sampled)
        output.new_token_ids = sampled[:num_taken]
        if request.sampling.logprobs is not None:
            output.logprobs = result.logprobs.get(request_id, [])[:num_taken]
        if reason is not None:
            output.finish_reason = reason
            last = request.token_ids[-1]
            if reason == "stop" and last in request.sampling.stop_token_ids:
                output.stop_reason = last
            self._finish(request, reason)
        return output

    def _take_pooled(self, request: Request, result: ModelRunnerOutput) -> EngineOutput:
        """End a request with its vector."""
        pooled = result.pooled.get(request.request_id)
        if pooled is None:
            return self._end_without_news(request, f"step {result.step_id} gave no vector")
        self._finish(request, "stop")
        return EngineOutput(
            request_id=request.request_id,
            finish_reason="stop",
            num_cached_tokens=request.num_cached_tokens,
            pooled=pooled,
        )

    def _take_tokens(self, request: Request, sampled: list[int]) -> tuple[str | None, int]:
        """Append tokens up to the first that ends the request; its reason and their count."""
        reason, num_taken = None, 0
        for token_id in sampled:
            request.token_ids.append(token_id)
            num_taken += 1
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                break
        self.num_generated_tokens += num_taken
        return reason, num_taken

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        """Why the request ends with `token_id`, its last token; None when it goes on."""
        num_tokens, sampling = len(request.token_ids), request.sampling
        may_stop = num_tokens - request.num_prompt_tokens > sampling.min_tokens
        # A form that is complete wins over min_tokens: nothing may follow it.
        if token_id in request.stop_ids and (may_stop or sampling.structured is not None):
            return "stop"
        return "length" if num_tokens >= request.max_total_tokens else None

    def _collect_prompt_logprobs(self, request: Request, result: ModelRunnerOutput) -> None:
        if request.prompt_logprobs is not None:  # not yet handed out
            request.prompt_logprobs.extend(result.prompt_logprobs.get(request.request_id, ()))

    # ---- ends ----

    def _finish(self, request: Request, reason: str) -> None:
        """End `request` and free its blocks; the caller takes it out of its queue."""
        request.status = RequestStatus.FINISHED
        request.epoch += 1
        self.kv_cache.free(request)
        del self.requests[request.request_id]
        self._finished_ids.append(request.request_id)
        self.finished[reason] += 1

    def _end_without_news(
        self, request: Request, error: str | None, reason: str = "error"
    ) -> EngineOutput:
        """End `request` without news; see `_finish`."""
        self._finish(request, reason)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def _drop_finished_from_running(self) -> None:
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def finish_requests(
        self, request_ids: Iterable[str], reason: str, error: str | None = None
    ) -> list[EngineOutput]:
        """End requests from outside ("abort" or "error"), whatever their state.

        Their results in flight will be dropped. Unknown ids are ignored: the request may have
        ended by itself meanwhile.
        """
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.BLOCKED:
                del self.blocked[request_id]
            elif request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
            outputs.append(self._end_without_news(request, error, reason))
        self._drop_finished_from_running()
        return outputs

    def roll_back(self, step_id: int) -> list[str]:
        """Void plan `step_id` and every later one: their tokens count as not computed.

        What those plans told the runner about ended and preempted requests is told again.

        Returns:
            Ids of the requests those plans advanced and that are still unfinished.
        """
        affected: dict[str, None] = {}
        for later_id in reversed([i for i in self._in_flight if i >= step_id]):
            plan, parts = self._in_flight.pop(later_id)
            self._finished_ids[:0] = plan.finished_ids
            self._preempted_ids[:0] = plan.preempted_ids
            for request, epoch, start, _, samples in parts:
                if request.epoch == epoch:
                    request.num_computed_tokens = start
                    request.num_placeholders -= samples
                    affected[request.request_id] = None
        return list(affected)

    def preempt_requests(self, request_ids: Iterable[str]) -> None:
        """Preempt running requests, so that the runner gets them anew and complete."""
        victims = [self.requests[request_id] for request_id in request_ids]
        for request in reversed(victims):  # the first one ends at the head of the queue
            self.running.remove(request)
            self._preempt(request)

    def check_integrity(self) -> None:
        """Compare queues, requests and blocks with each other.

        Raises:
            EngineError: names what disagrees.
        """
        self.kv_cache.check_integrity()
        if len(self.requests) != len(self.running) + self.num_waiting:
            raise EngineError(
                f"{len(self.requests)} requests != {len(self.running)} running + "
                f"{self.num_waiting} waiting"
            )
        running = {id(request) for request in self.running}
        for request in self.requests.values():
            if (id(request) in running) != (request.status is RequestStatus.RUNNING):
                raise EngineError(f"{request.request_id!r} is {request.status} in the wrong queue")
            num_slots = self.kv_cache.num_slots(request)
            if request.num_computed_tokens > num_slots:
                raise EngineError(
                    f"{request.request_id!r} has {request.num_computed_tokens} computed tokens "
                    f"in {num_slots} slots"
                )
            if request.status is not RequestStatus.RUNNING and request.blocks:
                raise EngineError(f"{request.request_id!r} waits and holds blocks")
