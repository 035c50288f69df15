"""Every field's limits, the errors' field names, and the trip over IPC."""

from __future__ import annotations

import math

import msgspec
import pytest

from girih.kernels.base.errors import RequestError
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams

BAD = [
    ("n", 0),
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", -0.0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**63),
    ("max_tokens", 2**64),
    ("logit_bias", {1: 1e38}),
    ("logit_bias", {1: -1e38}),
    ("min_p", -0.01),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("seed", 2**64),
    ("seed", 1.0),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop", ("a\ud83d",)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("logprobs", -2),
    ("prompt_logprobs", True),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (-5,)),
    ("bad_words", ((),)),
    ("bad_words", ((1, -1),)),
    ("stop", 5),
    ("stop", {}),
    ("stop_token_ids", 5),
    ("stop_token_ids", "ab"),
    ("allowed_token_ids", 3),
    ("bad_words", 5),
    ("bad_words", "ab"),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 1}),
    ("ignore_eos", "no"),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", 1),
    ("extra_args", [1]),
    ("extra_args", {"a": "\ud83d"}),
    ("structured", {"json": {}}),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v))
def test_bad_value_names_field_and_value(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_no_tokens_are_asked_for_only_with_scores_of_the_prompt():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).scores_only
    assert not SamplingParams(max_tokens=1, prompt_logprobs=0).scores_only
    with pytest.raises(RequestError, match=r"max_tokens is 0; .* or 0 with prompt_logprobs"):
        SamplingParams(max_tokens=0)


def test_integers_too_long_to_be_printed_are_refused():
    for name in ("temperature", "repetition_penalty", "n", "max_tokens", "logprobs", "top_k"):
        for digits in (400, 5000):
            with pytest.raises(RequestError, match=f"{name} is an integer of .* bits"):
                SamplingParams(**{name: 10**digits})
    with pytest.raises(RequestError, match="stop_token_ids has the entry an integer of"):
        SamplingParams(stop_token_ids=(10**5000,))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, "no field 'temprature'; did you mean 'temperature'? Fields: allowed_"),
        ({"max_token": 5}, "did you mean 'max_tokens'?"),
        ({"zzz": 5}, "SamplingParams has no field 'zzz'; Fields: "),
        ({"stop": 5}, "stop is 5; it must be a string, or a list of strings"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be an integer >= 1 or null"),
        (
            {"stop_token_ids": ["a"]},
            "stop_token_ids has the entry 'a'; token ids are integers",
        ),
        (
            {"structured": "json"},
            "it must be a StructuredOutput, e.g. StructuredOutput.json_",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_told_with_what_is_allowed(fields, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert words in str(caught.value)


def test_values_have_names():
    with pytest.raises(RequestError, match=r"was given 0\.5 without a name"):
        SamplingParams(0.5)


GOOD = [
    {},
    {"temperature": 0},
    {"top_p": 1e-6},
    {"top_k": -1},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"max_tokens": None, "min_tokens": 1000},
    {"min_tokens": 16},
    {"logprobs": -1, "prompt_logprobs": 0},
    {"logit_bias": {3: -100}},
    {"allowed_token_ids": [1, 2]},
]


@pytest.mark.parametrize("fields", GOOD, ids=repr)
def test_values_at_the_limits_are_taken(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


def test_lists_become_tuples_and_one_stop_string_is_one_entry():
    params = SamplingParams(stop="end", stop_token_ids=[1], bad_words=[[1, 2], [3]])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1,)
    assert params.bad_words == ((1, 2), (3,))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (50,)},
        {"logit_bias": {50: 1.0}},
        {"allowed_token_ids": (1, 50)},
        {"bad_words": ((1,), (2, 50))},
    ],
    ids=repr,
)
def test_token_ids_outside_the_vocabulary_are_refused(fields):
    params = SamplingParams(**fields)
    params.check_vocabulary(51)
    with pytest.raises(RequestError, match="token id 50; the vocabulary ends at 49") as caught:
        params.check_vocabulary(50)
    assert caught.value.param == next(iter(fields))


def test_request_crosses_ipc_unchanged_and_is_checked_again():
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(stop=["x"], logit_bias={3: 1.5}, bad_words=[[4]], seed=7),
    )
    wire = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(wire, type=EngineRequest) == request
    wire = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(RequestError):
        msgspec.msgpack.decode(wire, type=SamplingParams)
