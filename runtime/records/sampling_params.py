"""Parameters that choose a request's tokens and its end (no torch; crosses process borders).

`SamplingParams` checks itself when it is made: a value that cannot take effect raises
`RequestError` naming the field. Checks that need the vocabulary are in `check_vocabulary`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from girih.kernels.base.errors import RequestError
from girih.runtime.records.named_fields import NamedFields
from girih.runtime.records.structured_output import StructuredOutput

MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_INTEGER = 2**63 - 1
MAX_LOGIT_BIAS = 100.0
MIN_TEMPERATURE = 2.0**-126
"""The smallest normal float32: below it a temperature has no full precision, or is 0."""
_LISTS = {
    "stop": "a string, or a list of strings",
    "stop_token_ids": "a list of token ids",
    "allowed_token_ids": "a list of token ids, or null",
    "bad_words": "a list of lists of token ids",
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    """Raise `RequestError` unless `value` is a finite float64 with `low` <= value <= `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or abs(value) > sys.float_info.max:
        raise RequestError(f"{name} is {_shown(value)}; it must be {allowed}", param=name)


def check_integer(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    """Raise `RequestError` unless `value` is an integer with `low` <= value (<= `high`).

    None for `high` stands for what 64 bits hold.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and high is None and value > MAX_INTEGER:
        allowed = f"at most {MAX_INTEGER}"
    if not is_integer or not low <= value <= (MAX_INTEGER if high is None else high):
        raise RequestError(f"{name} is {_shown(value)}; it must be {allowed}", param=name)


def _shown(value: Any) -> str:
    """A value in an error; Python does not print integers of thousands of digits."""
    is_long = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if is_long else repr(value)


def _check_token_ids(name: str, token_ids: Iterable[Any]) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_INTEGER:
            raise RequestError(
                f"{name} has the entry {_shown(token_id)}; token ids are integers >= 0", param=name
            )


def check_kind(name: str, value: Any, kind: Any, allowed: str) -> None:
    """Raise `RequestError` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}; it must be {allowed}", param=name)


def plain_extra_args(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `arguments` of logits processors, which can go to another process.

    Raises:
        RequestError: one cannot.
    """
    for key, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not isinstance(key, str) or not all(map(_is_plain, values)):
            raise RequestError(
                f"extra_args has the entry {str(key)[:80]!r}: {str(value)[:80]!r}; keys are text, "
                "values text, 64-bit integers, numbers, booleans, null, or lists of these",
                param="extra_args",
            )
    return arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return MIN_SEED <= value <= MAX_SEED
    return value is None or isinstance(value, float) or _is_text(value)


def _is_text(value: Any) -> bool:
    """Return whether it is text without lone surrogates, which cannot be encoded."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=NamedFields):
    """Sampling and stop rules of one request.

    Lists given for tuple fields are turned into tuples; a single string for `stop` is one entry.

    Attributes:
        n: completions per prompt (expanded by the caller; the core sees single ones).
        temperature: 0 is greedy, and so is less than 1.2e-38; else the divisor of the logits.
        top_p: keep the smallest set of tokens with this much probability, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
        presence_penalty: taken from logits of tokens already in the output, in [-2, 2].
        frequency_penalty: the same, times how often they occurred, in [-2, 2].
        repetition_penalty: > 0; above 1 discourages tokens of prompt and output.
        seed: makes the request reproducible in any batch; None draws a new one.
        stop: strings that end the output (matched on text, outside the core).
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        min_tokens: no stop id or end of sequence is produced before this many tokens.
        max_tokens: largest number of output tokens; None fills the room the context leaves; 0 with
            `prompt_logprobs` scores the prompt and nothing else.
        logprobs: top alternatives to report per output token; 0 only the chosen token's,
            -1 the whole vocabulary, None nothing.
        prompt_logprobs: the same for prompt tokens.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: only these may be produced; None allows all.
        bad_words: token id sequences that are never produced.
        skip_special_tokens: leave special tokens out of the text.
        extra_args: arguments of logits processors: text, numbers, booleans, null, or lists of
            these.
        structured: the form the output must have; it wins over every other setting.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    extra_args: dict[str, Any] | None = None
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lengths()
        self._check_lists()
        self._check_bias()
        self._check_structured()
        for name in _FLAGS:
            check_kind(name, getattr(self, name), bool, "true or false")
        if self.extra_args is not None:
            check_kind("extra_args", self.extra_args, dict, "a map from names to values, or null")
            plain_extra_args(self.extra_args)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def scores_only(self) -> bool:
        """True if the prompt is all that is computed."""
        return self.max_tokens == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` when a token id lies outside the vocabulary of `vocab_size`."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias or ()),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": tuple(token for word in self.bad_words for token in word),
        }
        for name, token_ids in named.items():
            if token_ids and max(token_ids) >= vocab_size:
                raise RequestError(
                    f"{name} has token id {max(token_ids)}; the vocabulary ends at "
                    f"{vocab_size - 1}",
                    param=name,
                )

    def _normalise(self) -> None:
        set_field = msgspec.structs.force_setattr
        if isinstance(self.stop, str):
            set_field(self, "stop", (self.stop,))
        for name, allowed in _LISTS.items():
            value = getattr(self, name)
            if value is not None:
                check_kind(name, value, list | set | tuple, allowed)
                set_field(self, name, tuple(value))
            elif name != "allowed_token_ids":
                set_field(self, name, ())
        if any(isinstance(word, list) for word in self.bad_words):
            set_field(self, "bad_words", tuple(tuple(word) for word in self.bad_words))

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf, "0 (greedy) or larger")
        check_number("top_p", self.top_p, 0, 1, "in (0, 1]")
        if self.top_p == 0:
            raise RequestError(f"top_p is {self.top_p!r}; it must be in (0, 1]", param="top_p")
        check_number("min_p", self.min_p, 0, 1, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -2, 2, "in [-2, 2]")
        check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, "above 0")
        if self.repetition_penalty == 0:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty!r}; it must be above 0",
                param="repetition_penalty",
            )
        check_integer("top_k", self.top_k, -1, None, "0 or -1 (off), or a positive integer")
        if self.seed is not None:
            check_integer("seed", self.seed, MIN_SEED, MAX_SEED, "a 64-bit integer or null")

    def _check_lengths(self) -> None:
        check_integer("n", self.n, 1, None, "an integer >= 1")
        check_integer("min_tokens", self.min_tokens, 0, None, "an integer >= 0")
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            allowed = "an integer >= 1 or null, or 0 with prompt_logprobs to score the prompt alone"
            check_integer("max_tokens", self.max_tokens, least, None, allowed)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}; it must not exceed max_tokens "
                    f"({self.max_tokens})",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, -1, None, "-1 (whole vocabulary), 0 or more, or null")

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        made_by = "a StructuredOutput, e.g. StructuredOutput.json_schema(...)"
        check_kind("structured", self.structured, StructuredOutput, made_by)
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos is true, but structured output ends where its form is complete; leave "
                "one of them out",
                param="ignore_eos",
            )

    def _check_lists(self) -> None:
        for text in self.stop:
            if not _is_text(text) or not text:
                raise RequestError(
                    f"stop has the entry {text!r}; every entry must be a non-empty string",
                    param="stop",
                )
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty; name at least one token id, or leave it out",
                    param="allowed_token_ids",
                )
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        for word in self.bad_words:
            if not isinstance(word, tuple) or not word:
                raise RequestError(
                    f"bad_words has the entry {word!r}; every entry must be a non-empty list of "
                    "token ids",
                    param="bad_words",
                )
            _check_token_ids("bad_words", word)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        check_kind("logit_bias", self.logit_bias, dict, "a map from token ids to values, or null")
        _check_token_ids("logit_bias", self.logit_bias)
        allowed = f"a map to values in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
        for bias in self.logit_bias.values():
            check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, allowed)
