"""Records of one request: what enters the core, what leaves it, and its state inside.

    EngineRequest ──add_request──▶ Request (scheduler's state) ──step──▶ EngineOutput

`EngineRequest` and `EngineOutput` are msgspec records and cross process borders. `Request` never
leaves the core. No torch here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    from girih.runtime.schedule.block_pool import KVBlock
    from girih.runtime.schedule.pending_grammars import PendingGrammar


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is handed to the core (`n` completions are `n` of these).

    Attributes:
        request_id: unique among the unfinished requests.
        prompt_token_ids: at least one token id.
        sampling: how tokens are chosen and when to stop.
        pooling: the vector that is wanted instead of tokens (`sampling` is not looked at then).
        eos_token_ids: the model's end-of-sequence ids.
        arrival_time: seconds on any clock shared by all requests; orders the priority policy.
        priority: lower is served first (policy "priority" only).
        cache_salt: requests share cached prefixes only with equal salts.
        trace: the client's place in a distributed trace: W3C headers by name.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    pooling: PoolingParams | None = None
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    trace: dict[str, str] = {}


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, of the raw distribution (natural logarithm).

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability.
        rank: 1 for the most likely token of the vocabulary.
        top_token_ids: the most likely token ids, best first (whole vocabulary for -1).
        top_logprobs: their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of one step for one request.

    Attributes:
        request_id: whose output this is.
        new_token_ids: output tokens since the last record (a stop token id is included).
        finish_reason: None while running, else "stop", "length", "abort" or "error".
        stop_reason: the entry of `stop_token_ids` that ended it; None for end of sequence.
        logprobs: one per new token when they were asked for.
        prompt_logprobs: one per prompt token (None for the first), with the first new token.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: what went wrong, for finish reason "error".
        pooled: the vector asked for, little-endian float32 (one per token: one after the other).
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: bytes | None = None

    @property
    def has_result(self) -> bool:
        """True if something came of the step: tokens, a vector, or the scores of a prompt."""
        found = (self.pooled, self.prompt_logprobs)
        return bool(self.new_token_ids) or any(value is not None for value in found)


class RequestStatus(enum.Enum):
    """Where a request stands."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    PREEMPTED = "preempted"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """State of one unfinished request; written by the scheduler and the KV cache manager only.

    Token accounting, in positions of the sequence (prompt first, then output):

        0 ........ num_computed_tokens ........ num_tokens ........ + num_placeholders
        |  planned or done  |  known, not planned   |  results still in flight  |

    Attributes:
        token_ids: prompt and output so far.
        num_computed_tokens: positions whose KV is computed or planned (optimistic).
        num_placeholders: tokens that plans in flight will sample.
        max_total_tokens: prompt + output may not grow beyond this.
        stop_ids: ids that end the output (stop ids, and end of sequence unless ignored).
        epoch: grows whenever results in flight become void (preempted, finished).
        blocks: KV blocks in sequence order, see `kv_cache` (it writes these four).
        num_cached_blocks: leading rows of blocks already offered to the prefix cache.
        num_released_rows: leading rows given back, per kind of KV group that forgets.
        kv_due: computed tokens at which the KV cache manager has something to do.
        block_hashes: chained hashes of the leading full blocks, filled on demand.
        pending_grammar: the work it waits for (see `PendingGrammars`), held until it is gone.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "blocks",
        "cache_salt",
        "epoch",
        "kv_due",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_released_rows",
        "pending_grammar",
        "pooling",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "sequence",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, source: EngineRequest, sequence: int, max_total_tokens: int) -> None:
        sampling = source.sampling
        self.request_id = source.request_id
        self.sampling = sampling
        self.pooling = source.pooling
        self.pending_grammar: PendingGrammar | None = None
        self.priority = source.priority
        self.arrival_time = source.arrival_time
        self.cache_salt = source.cache_salt
        self.sequence = sequence
        self.max_total_tokens = max_total_tokens
        self.token_ids: list[int] = list(source.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        eos_token_ids = () if sampling.ignore_eos else source.eos_token_ids
        self.stop_ids = frozenset((*sampling.stop_token_ids, *eos_token_ids))
        self.status = RequestStatus.WAITING
        self.epoch = 0
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.restart_prompt_logprobs()
        self.blocks: list[KVBlock] = []
        self.num_cached_blocks = 0
        self.num_released_rows: list[int] = []
        self.kv_due = 0
        self.block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output whose ids are known."""
        return len(self.token_ids)

    @property
    def must_wait(self) -> bool:
        """True if something from outside is missing still."""
        return self.pending_grammar is not None and not self.pending_grammar.done()

    @property
    def is_answering(self) -> bool:
        """True if its prompt is done and tokens follow."""
        return self.pooling is None and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    def restart_prompt_logprobs(self) -> None:
        """Collect from the start again; the first prompt token has no distribution before it."""
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def sort_key(self) -> tuple[int, float, int]:
        """Order under the priority policy: the smallest is served first, the largest preempted."""
        return (self.priority, self.arrival_time, self.sequence)
