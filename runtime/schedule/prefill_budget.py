"""The prompt tokens that a step may take beside answers: a time, turned into tokens by feedback.

A step with prompt tokens may last `scheduler.target_step_ms`, or twice as long as one that only
goes on with answers, whichever is more. How many tokens that is depends on model, processor,
context and load; it is learnt from the steps that ran.
"""

from __future__ import annotations

LEAST_TOKENS = 16  # a prompt gets on with, however slow its steps are; also where learning begins
MOST_CHANGE = 2.0  # factor between the budgets of two steps
DECODE_WEIGHT = 0.2  # of the newest step in the mean time of steps without prompt tokens


class PrefillBudget:
    """Learns how many prompt tokens fit into a step.

    Args:
        target_ms: milliseconds a step with prompt tokens may last.
    """

    def __init__(self, target_ms: float) -> None:
        self._target = target_ms / 1000
        self._decode_seconds = 0.0
        self._tokens = float(LEAST_TOKENS)

    def tokens(self, most: int) -> int:
        """Return the prompt tokens of the next step beside answers, at most `most`."""
        return min(most, int(self._tokens))

    def learn(self, num_prompt_tokens: int, num_answers: int, seconds: float) -> None:
        """Take in a step that ran.

        Args:
            num_prompt_tokens: its tokens of prompts.
            num_answers: its requests that went on with their answer.
            seconds: its time in the runner.
        """
        if seconds <= 0:  # nobody timed it
            return
        if num_prompt_tokens == 0:
            known = self._decode_seconds or seconds
            self._decode_seconds = known + DECODE_WEIGHT * (seconds - known)
        elif num_answers and 2 * num_prompt_tokens >= self._tokens:  # fewer tell little
            allowed = max(self._target - self._decode_seconds, self._decode_seconds)
            taken = max(seconds - self._decode_seconds, seconds / 100)
            wanted = num_prompt_tokens * allowed / taken
            least, most = self._tokens / MOST_CHANGE, self._tokens * MOST_CHANGE
            self._tokens = max(LEAST_TOKENS, min(max(wanted, least), most))
