"""A model runner without a model: the next token is a hash of the tokens read from a fake KV.

The fake KV memory holds, per (block, slot), a hash of the token prefix that ends there, built
from what is *read* at the position before. So a wrong block table, a block handed out too early or
a prefix cache hit on wrong content changes every later token; it is also noted in `violations`.
With KV groups, what is written differs per group, and each group reads what its kind sees.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from girih.kernels.kv.groups import FULL, KVCacheGroup
from girih.runtime.records.plans import ModelRunnerOutput, NewRequest, SchedulerOutput
from girih.runtime.records.request import EngineRequest, TokenLogprobs

NextToken = Callable[[list[int]], int]


def _extend(prefix_hash: int, token_id: int) -> int:
    return hash((prefix_hash, token_id))


def _choose(values: list[int], vocab_size: int, banned: frozenset[int]) -> int:
    token = hash(tuple(values)) % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def fake_next_token(
    token_ids: list[int], vocab_size: int, banned: frozenset[int] = frozenset()
) -> int:
    """The token a correct `FakeRunner` gives after `token_ids`."""
    values, chain = [], 0
    for token_id in token_ids:
        chain = _extend(chain, token_id)
        values.append(chain)
    return _choose(values, vocab_size, banned)


def fake_generate(request: EngineRequest, vocab_size: int, max_model_len: int) -> list[int]:
    """Output tokens of `request` run alone: the naive oracle for the whole engine."""
    sampling = request.sampling
    stop_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= set(request.eos_token_ids)
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    values: list[int] = []  # of the prefixes so far: longer ones go on with them
    for token_id in tokens:
        values.append(_extend(values[-1] if values else 0, token_id))
    while True:
        early = len(output) < sampling.min_tokens
        banned = frozenset(stop_ids) if early else frozenset()
        output.append(_choose(values, vocab_size, banned))
        values.append(_extend(values[-1], output[-1]))
        if output[-1] in stop_ids:
            return output
        if sampling.max_tokens is not None and len(output) == sampling.max_tokens:
            return output
        if len(tokens) + len(output) == max_model_len:
            return output


@dataclass
class _Row:
    request: NewRequest
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class FakeRunner:
    """Executes plans against a fake KV memory (see the module's docstring).

    Args:
        block_size: token slots per block.
        vocab_size: tokens are in [0, vocab_size).
        next_token: chooses the next token from the row's tokens instead of the hash.
        step_seconds: how long a step takes.
        groups: the KV groups.
        fail_at: step number (from 0) -> exception to raise instead of running it.
    """

    def __init__(
        self,
        block_size: int = 16,
        vocab_size: int = 1000,
        next_token: NextToken | None = None,
        step_seconds: float = 0.0,
        fail_at: dict[int, BaseException] | None = None,
        groups: Sequence[KVCacheGroup] = (FULL,),
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.next_token = next_token
        self.step_seconds = step_seconds
        self.fail_at = fail_at or {}
        self.groups = tuple(groups)
        self.memory: dict[tuple[int, int], int] = {}
        self.rows: dict[str, _Row] = {}
        self.violations: list[str] = []
        self.plans: list[SchedulerOutput] = []
        self.num_steps = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; all writes of the step land before anything is read for sampling."""
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if number in self.fail_at:
            raise self.fail_at[number]
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.plans.append(plan)
        self._update_rows(plan)
        prompt_logprobs = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            chunk = self._write(request_id, num_tokens)
            if chunk is not None:
                prompt_logprobs[request_id] = chunk
        sampled, logprobs, pooled = {}, {}, {}
        for request_id in plan.num_scheduled_tokens:
            row = self.rows[request_id]
            if row.num_computed_tokens < len(row.token_ids):
                continue
            if row.request.pooling is not None:
                pooled[request_id] = fake_pooled(row.token_ids)
            else:
                token = self._sample(row)
                row.token_ids.append(token)
                sampled[request_id] = [token]
                if row.request.sampling.logprobs is not None:
                    logprobs[request_id] = [fake_logprobs(token)]
        return ModelRunnerOutput(plan.step_id, sampled, logprobs, prompt_logprobs, pooled=pooled)

    def _note(self, condition: bool, text: str) -> None:
        if not condition:
            self.violations.append(text)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            self.rows.pop(request_id, None)
        for new in plan.new_requests:
            self._note(new.request_id not in self.rows, f"{new.request_id} is not new")
            self.rows[new.request_id] = _Row(
                new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens
            )
        for update in plan.running:
            row = self.rows[update.request_id]
            self._note(
                row.num_computed_tokens == update.num_computed_tokens,
                f"{update.request_id}: computed {row.num_computed_tokens}, "
                f"plan says {update.num_computed_tokens}",
            )
            row.block_ids.extend(update.new_block_ids)
        named = {r.request_id for r in plan.new_requests} | {r.request_id for r in plan.running}
        self._note(named == set(plan.num_scheduled_tokens), "plan names and runs other requests")

    def _slot(self, row: _Row, position: int, group: int) -> tuple[int, int]:
        index = position // self.block_size * len(self.groups) + group
        self._note(row.block_ids[index] != 0, f"position {position} is in the null block")
        return (row.block_ids[index], position % self.block_size)

    def _read(self, row: _Row, start: int, end: int) -> list[int]:
        """What the token at `start` and those after it see before `end`, group by group.

        Returns:
            The prefix hashes of all positions before `end`, wrong where a group saw a wrong one.
        """
        values, chain = [], 0
        for token_id in row.token_ids[:end]:
            chain = _extend(chain, token_id)
            values.append(chain)
        for number, group in enumerate(self.groups):
            for position in range(group.first_needed(start), end):
                found = self.memory.get(self._slot(row, position, number), -1)
                if found != _extend(values[position], number):
                    name = row.request.request_id
                    self.violations.append(f"{name}: wrong KV at {position} in group {number}")
                    values[position] = -1
        return values

    def _write(self, request_id: str, num_tokens: int) -> list[TokenLogprobs] | None:
        row = self.rows[request_id]
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        self._note(
            num_tokens > 0 and end <= len(row.token_ids),
            f"{request_id}: {end} tokens planned, {len(row.token_ids)} known",
        )
        if end * len(self.groups) > len(row.block_ids) * self.block_size:
            self.violations.append(f"{request_id}: no slot for position {end - 1}")
            raise AssertionError(self.violations[-1])
        before = self._read(row, start, start)
        chain = before[-1] if before else 0
        for position in range(start, end):
            chain = _extend(chain, row.token_ids[position])
            for group in range(len(self.groups)):
                self.memory[self._slot(row, position, group)] = _extend(chain, group)
        row.num_computed_tokens = end
        num_prompt = row.request.num_prompt_tokens
        if row.request.sampling.prompt_logprobs is None or start >= num_prompt - 1:
            return None
        return [fake_logprobs(t) for t in row.token_ids[start + 1 : min(end + 1, num_prompt)]]

    def _sample(self, row: _Row) -> int:
        values = self._read(row, len(row.token_ids) - 1, len(row.token_ids))
        if self.next_token is not None:
            return self.next_token(row.token_ids)
        num_output = len(row.token_ids) - row.request.num_prompt_tokens
        early = num_output < row.request.sampling.min_tokens
        banned = frozenset(row.request.stop_token_ids) if early else frozenset()
        return _choose(values, self.vocab_size, banned)


def fake_pooled(token_ids: list[int]) -> bytes:
    """A vector that tells texts apart: their sum, their length."""
    return array("f", [float(sum(token_ids)), float(len(token_ids))]).tobytes()


def fake_logprobs(token_id: int) -> TokenLogprobs:
    """A recognisable record for `token_id`."""
    return TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5])
