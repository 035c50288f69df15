"""Beam search on top of the engine: every round extends all beams by one token in one batch.

beams ─▶ one request per beam (one token, its best alternatives) ─▶ candidates ─▶ best beams
             │ its prompt is in the prefix cache                        ╰▶ ended ones are kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from girih.runtime.records.named_fields import NamedFields
from girih.runtime.records.request import TokenLogprobs
from girih.runtime.records.sampling_params import (
    SamplingParams,
    check_integer,
    check_kind,
    check_number,
)
from girih.serve.offline.outputs import RequestOutput


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=NamedFields):
    """Parameters of a beam search.

    Attributes:
        beam_width: sequences kept per prompt, and returned.
        max_tokens: longest output in tokens.
        length_penalty: a sequence's score is its log-probability / length ** length_penalty.
        ignore_eos: go on after the end token.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, None, "an integer >= 1")
        check_integer("max_tokens", self.max_tokens, 1, None, "an integer >= 1")
        check_number("length_penalty", self.length_penalty, -math.inf, math.inf, "a number")
        check_kind("ignore_eos", self.ignore_eos, bool, "true or false")


@dataclass
class BeamSequence:
    """One sequence that was found.

    Attributes:
        token_ids: its output, an end token included.
        logprob: sum of its tokens' log-probabilities.
        finish_reason: "stop" or "length".
        text: its output as text.
    """

    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    finish_reason: str = "length"
    text: str = ""

    def score(self, length_penalty: float) -> float:
        """Return the value that sequences are ordered by, the largest first."""
        return self.logprob / math.pow(max(1, len(self.token_ids)), length_penalty)


Extend = Callable[[list[list[int]], SamplingParams], Sequence[RequestOutput]]
"""Complete prompts, given as ids; `LLM.generate` is one."""


class BeamSearch:
    """Searches several prompts together.

    Args:
        extend: completes prompts.
        params: how to search.
        eos_token_ids: ids that end a sequence.
    """

    def __init__(
        self, extend: Extend, params: BeamSearchParams, eos_token_ids: Sequence[int]
    ) -> None:
        self._extend = extend
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        # Twice as many as beams: with all beams ending at once there are enough that go on.
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True
        )

    def run(self, prompts: Sequence[list[int]]) -> list[list[BeamSequence]]:
        """Return `beam_width` sequences per prompt, the best first."""
        live = [[BeamSequence()] for _ in prompts]
        ended: list[list[BeamSequence]] = [[] for _ in prompts]
        for _ in range(self._params.max_tokens):
            if not any(live):
                break
            self._advance(prompts, live, ended)
        penalty = self._params.length_penalty
        return [
            sorted(done + beams, key=lambda beam: beam.score(penalty), reverse=True)[
                : self._params.beam_width
            ]
            for done, beams in zip(ended, live, strict=True)
        ]

    def _advance(
        self,
        prompts: Sequence[list[int]],
        live: list[list[BeamSequence]],
        ended: list[list[BeamSequence]],
    ) -> None:
        """Extend every live beam by one token."""
        beams = [(index, beam) for index, group in enumerate(live) for beam in group]
        outputs = self._extend(
            [prompts[index] + beam.token_ids for index, beam in beams], self._sampling
        )
        candidates: list[list[BeamSequence]] = [[] for _ in prompts]
        for (index, beam), output in zip(beams, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None, "they were asked for"
            candidates[index] += self._extensions(beam, logprobs[0])
        for index, found in enumerate(candidates):
            found.sort(key=lambda beam: beam.logprob, reverse=True)
            best = found[: 2 * self._params.beam_width]
            ended[index] += [beam for beam in best if beam.finish_reason == "stop"]
            going_on = [beam for beam in best if beam.finish_reason != "stop"]
            live[index] = going_on[: self._params.beam_width]

    def _extensions(self, beam: BeamSequence, logprobs: TokenLogprobs) -> list[BeamSequence]:
        return [
            BeamSequence(
                [*beam.token_ids, token_id],
                beam.logprob + value,
                "stop" if token_id in self._eos else "length",
            )
            for token_id, value in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        ]
