"""Checks a request must pass before the scheduler takes it. No torch.

Whatever passes here can be finished: it fits the context, the step budget and the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from girih.kernels.errors import RequestError
from girih.runtime.config import SchedulerConfig
from girih.runtime.request import EngineRequest


@dataclass(frozen=True)
class AdmissionLimits:
    """What one request may ask for.

    Attributes:
        config: the step budgets.
        max_model_len: longest prompt + output, in tokens.
        capacity_tokens: tokens one request alone can keep in the KV cache.
    """

    config: SchedulerConfig
    max_model_len: int
    capacity_tokens: int

    @property
    def largest_total(self) -> int:
        """Longest prompt + output that fits (the last token's KV is never needed)."""
        return min(self.max_model_len, self.capacity_tokens + 1)

    def max_total_tokens(self, request: EngineRequest) -> int:
        """Length at which `request` ends at the latest.

        Raises:
            RequestError: it cannot be served as it stands; names the field and the limit.
        """
        num_prompt = len(request.prompt_token_ids)
        self._check_prompt(num_prompt)
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

    def _check_prompt(self, num_prompt: int) -> None:
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if num_prompt >= self.largest_total:
            limit = "max_model_len" if self.largest_total == self.max_model_len else "the KV cache"
            raise RequestError(
                f"the prompt has {num_prompt} tokens; {limit} allows {self.largest_total} for "
                f"prompt and output together: at most {self.largest_total - 1} in the prompt",
                param="prompt",
            )
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and num_prompt > budget:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; without chunked prefill a prompt may have "
                f"at most scheduler.max_num_batched_tokens ({budget}): raise it, or set "
                "scheduler.enable_chunked_prefill=true",
                param="prompt",
            )
