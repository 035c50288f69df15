"""Whatever a random model says: held to a schema it parses and validates, 220 of them."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker
from support_core import core_of
from support_engines import eager_llm
from support_models import tiny_model
from support_schemas import LEAVES, WHOLE, WRAPPERS, all_schemas, closed

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import StructuredOutput

FORMATS = FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))
GROUPS = ("leaves", *WRAPPERS, "whole")


@pytest.fixture(scope="module")
def llm():
    return eager_llm(tiny_model("llama"), max_num_seqs=64, num_blocks=900, threads=1)


@pytest.fixture(scope="module")
def bias(llm):
    """A random model seldom closes what it opened."""
    closing = {llm.tokenizer.token_id(text): 8.0 for text in ('"', "}", "]")}
    space = [i for i in range(llm.tokenizer.vocab_size) if not llm.tokenizer.token_bytes(i).strip()]
    return {**closing, **dict.fromkeys(space, -8.0)}


def schemas_of(group):
    if group == "leaves":
        return dict(LEAVES)
    if group == "whole":
        return dict(WHOLE)
    return {n: s for n, s in all_schemas().items() if n.startswith(f"{group}-")}


def generate(llm, forms, **sampling):
    params = [
        SamplingParams(structured=form, seed=i, **{"max_tokens": 400, **sampling})
        for i, form in enumerate(forms)
    ]
    outputs = llm.generate(["x"] * len(forms), params)
    core_of(llm).check_integrity()
    return [output.outputs[0] for output in outputs]


def test_there_are_enough_schemas():
    assert len({json.dumps(schema) for schema in all_schemas().values()}) >= 200


@pytest.mark.parametrize("group", GROUPS)
def test_outputs_validate(llm, bias, group):
    schemas = schemas_of(group)
    forms = [
        StructuredOutput.json_schema(schema, is_compact=bool(i % 2))
        for i, schema in enumerate(schemas.values())
    ]
    for (name, schema), output in zip(
        schemas.items(), generate(llm, forms, logit_bias=bias), strict=True
    ):
        assert output.finish_reason == "stop", (name, output.text)
        validator = Draft7Validator if name == "tuple_old" else Draft202012Validator
        validator(schema, format_checker=FORMATS).validate(json.loads(output.text))


def test_optional_properties_are_optional(llm, bias):
    form = StructuredOutput.json_schema(WHOLE["all_optional"], is_compact=True)
    seen = {out.text for out in generate(llm, [form] * 40)}
    assert len({len(json.loads(text)) for text in seen}) >= 2


def test_many_different_grammars_at_once(llm, bias):
    """Each request keeps its own form, beside requests without one, whatever the library."""
    forms = []
    for i in range(16):
        forms += [
            StructuredOutput.json_schema(closed({f"key_{i}": {"type": "boolean"}})),
            StructuredOutput.choice([f"choice {i}", f"other {i}"]),
            StructuredOutput.regex(f"{i}-[a-c]{{{i + 1}}}"),
            None,
        ]
    outputs = generate(llm, forms, logit_bias=bias, max_tokens=80)
    for i in range(16):
        in_json, choice, regex, free = outputs[4 * i : 4 * i + 4]
        assert list(json.loads(in_json.text)) == [f"key_{i}"]
        assert choice.text in (f"choice {i}", f"other {i}")
        assert re.fullmatch(f"{i}-[a-c]{{{i + 1}}}", regex.text)
        assert free.token_ids


def test_a_form_gives_the_same_alone_and_in_a_batch(llm):
    forms = [StructuredOutput.regex(f"[a-z]{{{i + 3}}}") for i in range(8)]
    together = generate(llm, forms)
    for i, form in enumerate(forms):
        params = SamplingParams(structured=form, seed=i, max_tokens=400)
        assert llm.generate("x", params)[0].outputs[0].text == together[i].text


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_every_kind(llm, backend):
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    tag = {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "n="},
                {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                    "end": "</n>",
                },
            ],
        }
    }
    kinds = {
        "regex": (StructuredOutput.regex("[ab]{2}-[0-9]", backend=backend), "[ab]{2}-[0-9]"),
        "choice": (StructuredOutput.choice(["yes", 'no "é'], backend=backend), 'yes|no "é'),
        "grammar": (
            StructuredOutput.grammar('root ::= "(" root ")" | "x"', backend=backend),
            r"\(*x\)*",
        ),
        "tag": (StructuredOutput.structural_tag(tag, backend=backend), "n=<n>[12]</n>"),
    }
    outputs = generate(llm, [form for form, _ in kinds.values()], max_tokens=60)
    for (kind, (_, pattern)), output in zip(kinds.items(), outputs, strict=True):
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), (kind, output.text)
        else:
            assert kind == "grammar", (kind, output.text)


def test_a_triggered_tag_constrains_only_after_its_trigger(llm):
    tag = {
        "structures": [{"begin": "<f=x>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    form = StructuredOutput.structural_tag(tag)
    ids = {llm.tokenizer.token_id(text): 100.0 for text in "<f="}
    [free] = generate(llm, [form], max_tokens=20)
    [pushed] = generate(llm, [form], max_tokens=60, logit_bias=ids)
    assert len(free.token_ids) == 20
    for call in re.findall("<f=(.{4,7})", pushed.text):
        assert re.match("x>[12]<", call)


def test_json_object_is_an_object(llm, bias):
    forms = [StructuredOutput.json_object(is_compact=True)] * 6
    for output in generate(llm, forms, logit_bias=bias):
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_form_wins_over_bans(llm):
    no = llm.tokenizer.token_id("n")
    params = {"bad_words": ((no,),), "min_tokens": 30, "max_tokens": 40, "temperature": 0.0}
    [output] = generate(llm, [StructuredOutput.choice(["n"])], **params)
    assert output.text == "n"


def test_output_survives_preemption():
    """With few blocks requests lose theirs and come back: their matchers start anew."""
    path, limits = str(tiny_model("llama")), {"max_num_seqs": 8, "num_blocks": 10}
    small = eager_llm(path, max_model_len=256, threads=1, **limits)
    forms = [StructuredOutput.regex(f"[a-z]{{60}}-{i}") for i in range(8)]
    outputs = generate(small, forms)
    assert core_of(small).stats().num_preemptions > 0
    for i, output in enumerate(outputs):
        assert re.fullmatch(f"[a-z]{{60}}-{i}", output.text)


def test_bad_schemas_are_refused_before_they_run(llm):
    form = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"type": "x"}}})
    with pytest.raises(RequestError, match="/properties/a: Invalid type: x"):
        generate(llm, [form])
    assert not core_of(llm).scheduler.requests


def test_ignore_eos_contradicts_a_form():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured=StructuredOutput.json_object(), ignore_eos=True)
