"""Checks a request must pass before the scheduler takes it. No torch.

Whatever passes here can be finished: it fits the context, the step budget and the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from girih.kernels.base.errors import TOO_LONG, RequestError
from girih.runtime.records.config import SchedulerConfig
from girih.runtime.records.request import EngineRequest


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of a single request.

    Attributes:
        config: the step budgets.
        max_model_len: longest prompt + output, in tokens.
        capacity_tokens: tokens one request alone can keep in the KV cache.
        task: what the model is for.
    """

    config: SchedulerConfig
    max_model_len: int
    capacity_tokens: int
    task: str = "generate"

    @property
    def largest_total(self) -> int:
        """Longest prompt + output that fits (the last token's KV is never needed)."""
        return min(self.max_model_len, self.capacity_tokens + 1)

    def max_total_tokens(self, request: EngineRequest) -> int:
        """Length at which `request` ends at the latest.

        Raises:
            RequestError: it cannot be served as it stands; names the field and the limit.
        """
        self._check_task(request)
        num_prompt = len(request.prompt_token_ids)
        if request.pooling is not None:
            self._check_text(num_prompt)
            return num_prompt + 1  # one result is waited for, none is appended
        scores_only = request.sampling.scores_only
        self._check_prompt(num_prompt, self.largest_total - (not scores_only))
        if scores_only:
            return num_prompt + 1  # as above
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return self.largest_total
        total = min(num_prompt + max_tokens, self.max_model_len)
        if total > self.largest_total:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; the KV cache "
                f"holds at most {self.largest_total} tokens of prompt and output together: lower "
                "max_tokens or raise cache.kv_cache_bytes",
                param="max_tokens",
            )
        return total

    def _check_task(self, request: EngineRequest) -> None:
        wanted = "generate" if request.pooling is None else "embed"
        if (self.task == "generate") != (wanted == "generate"):
            raise RequestError(
                f"the model's task is {self.task!r}; it cannot serve a request to {wanted}",
                param="model",
            )

    @property
    def longest_text(self) -> int:
        """Longest text that can become a vector, in tokens."""
        return min(size for _, size in self._limits_of_text())

    def _limits_of_text(self) -> list[tuple[str, int]]:
        limits = [("max_model_len", self.max_model_len), ("the KV cache", self.capacity_tokens)]
        if not self.config.enable_chunked_prefill:
            whole = "a step, which takes texts whole (scheduler.max_num_batched_tokens),"
            limits.append((whole, self.config.max_num_batched_tokens))
        return limits

    def _check_text(self, num_tokens: int) -> None:
        """Check the length of a text that becomes a vector: nothing is appended to it."""
        if num_tokens == 0:
            raise RequestError("the text is empty; give at least one token", param="input")
        name, largest = min(self._limits_of_text(), key=lambda limit: limit[1])
        if num_tokens > largest:
            raise RequestError(
                f"the text has {num_tokens} tokens; {name} allows at most {largest}: shorten it, "
                "or set truncate_prompt_tokens",
                param="input",
                code=TOO_LONG,
            )

    def _check_prompt(self, num_prompt: int, longest: int) -> None:
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        longest = min(longest, self.capacity_tokens)
        if num_prompt > longest:
            limit = "max_model_len" if self.largest_total == self.max_model_len else "the KV cache"
            raise RequestError(
                f"the prompt has {num_prompt} tokens; {limit} allows {self.largest_total} for "
                f"prompt and output together: at most {longest} in the prompt",
                param="prompt",
                code=TOO_LONG,
            )
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and num_prompt > budget:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; without chunked prefill a prompt may have "
                f"at most scheduler.max_num_batched_tokens ({budget}): raise it, or set "
                "scheduler.enable_chunked_prefill=true",
                param="prompt",
            )
