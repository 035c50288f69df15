"""Forms, their faults with the place, the store of compiled grammars, matchers and masks."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from concurrent.futures import wait

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from support_core import make_request, run_to_end
from support_tokenizer import _trained_byte_fallback, _trained_byte_level

from girih.kernels.base.errors import RequestError
from girih.runtime.isolation import RowFailures
from girih.runtime.records.plans import NewRequest, SchedulerOutput
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import MAX_BYTES, StructuredOutput
from girih.runtime.sample.mask import unpack_mask
from girih.runtime.sample.sampler import SamplingInputs, sample
from girih.runtime.structured import backends
from girih.runtime.structured.closing import prepare
from girih.runtime.structured.rows import GrammarRows
from girih.runtime.structured.schema import find_fault
from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary

VOCAB, EOS = 424, 2


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    (path / "tokenizer.json").write_text(_trained_byte_level())
    return read_vocabulary(path, VOCAB, (EOS,))


@pytest.fixture
def store(vocabulary):
    return GrammarStore(lambda: vocabulary, max_grammars=4)


def allowed(matcher):
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    matcher.backend.fill([matcher], [0], mask)
    return set(unpack_mask(torch.from_numpy(mask), VOCAB)[0].nonzero()[:, 0].tolist())


def taken(vocabulary, form, text):
    """Whether a text may begin an output, and whether it may end there."""
    matcher = GrammarStore(lambda: vocabulary).matcher(form)
    is_taken = all(matcher.accept(token) for token in vocabulary.encode(text))
    return is_taken, is_taken and EOS in allowed(matcher)


def written(vocabulary, form):
    """The text of a form that allows one text only (or any of several that are equal)."""
    backend = backends.load(backends.choose(form)).make_backend(vocabulary, 1)
    matcher, text = backend.compile(form).matcher(), b""
    while not matcher.is_stopped:
        token = max(allowed(matcher))
        assert token not in vocabulary.special_ids - {EOS}
        assert matcher.accept(token), (text, matcher.error)
        text += vocabulary.tokens[token] if token != EOS else b""
        assert len(text) < 200
    return text.decode()


# ---- vocabularies ----

TOKENIZERS = {"byte level": _trained_byte_level, "byte fallback": _trained_byte_fallback}


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_vocabulary(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    (path / "tokenizer.json").write_text(TOKENIZERS[request.param]())
    return read_vocabulary(path, VOCAB, (EOS,))


ODD = [
    "<|im_end|>", "<|im_start|>user\n<|end|>", "a<|im_end|>b", " <|end|> ", "<0x0A>", "<tool call>",
    "plain", " two", "\n\n", "e\u0301", "\u2581a", "über 😀", "\x7f", "//\\\"'",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_tokens_of_a_text_spell_it(any_vocabulary, text):
    ids = any_vocabulary.encode(text)
    assert b"".join(any_vocabulary.tokens[i] for i in ids) == text.encode()
    assert any_vocabulary.no_text.isdisjoint(ids)


def test_what_the_encoder_changes_is_spelled_all_the_same(vocabulary):
    encoder = tokenizers.Tokenizer.from_str(_trained_byte_level())
    encoder.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Lowercase()]
    )
    changed = dataclasses.replace(vocabulary, encoder=encoder)
    for text in ("E\u0301", "<|im_end|>", "Quick"):
        assert b"".join(changed.tokens[i] for i in changed.encode(text)) == text.encode()


def test_tokens_that_the_model_has_no_logits_for_spell_nothing(vocabulary):
    narrow = dataclasses.replace(vocabulary, tokens=vocabulary.tokens[:410])
    assert vocabulary.encode("<tool call>") == [410]
    ids = narrow.encode("<tool call>")
    assert b"".join(narrow.tokens[i] for i in ids) == b"<tool call>"


MARK = "<|im_end|>"
SPELLED = {
    "choice": (StructuredOutput.choice, [MARK], MARK),
    "const": (StructuredOutput.json_schema, {"const": MARK}, f'"{MARK}"'),
    "enum": (StructuredOutput.json_schema, {"enum": [MARK]}, f'"{MARK}"'),
    "pattern": (
        StructuredOutput.json_schema, {"type": "string", "pattern": r"^<\|im_end\|>$"}, f'"{MARK}"'
    ),
    "regex": (StructuredOutput.regex, r"a<\|im_end\|>b", f"a{MARK}b"),
    "Lark": (StructuredOutput.grammar, f'start: "{MARK}"', MARK),
    "GBNF": (StructuredOutput.grammar, f'root ::= "a" "{MARK}"', f"a{MARK}"),
    "tag": (
        StructuredOutput.structural_tag,
        {"format": {"type": "tag", "begin": MARK, "end": MARK,
                    "content": {"type": "regex", "pattern": "a"}}},
        f"{MARK}a{MARK}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("kind", SPELLED)
def test_names_of_control_tokens_are_text(any_vocabulary, backend, kind):
    pytest.importorskip(backend)
    make, what, text = SPELLED[kind]
    assert written(any_vocabulary, make(what, backend=backend)) == text


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_fixed_text_may_be_of_any_character(vocabulary, backend):
    pytest.importorskip(backend)
    for code in (*range(1, 0x21), 0x22, 0x2F, 0x5C, *range(0x7E, 0xA2), 0x2028, 0xFEFF, 0x10FFFF):
        text = f"a{chr(code)}"
        tag = {"type": "tag", "begin": text, "end": text, "content": {"type": "any_text"}}
        backends.check(StructuredOutput.structural_tag({"format": tag}, backend=backend))
        assert written(vocabulary, StructuredOutput.choice([text], backend=backend)) == text


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_property_may_have_the_name_of_a_control_token(any_vocabulary, backend):
    pytest.importorskip(backend)
    schema = {"type": "object", "properties": {MARK: {"const": 1}}, "required": [MARK]}
    form = StructuredOutput.json_schema(schema | {"additionalProperties": False}, backend=backend)
    assert taken(any_vocabulary, form, f'{{"{MARK}":1}}') == (True, True)


# ---- forms ----

TAG = {
    "type": "triggered_tags",
    "triggers": ["｜f="],
    "tags": [
        {
            "type": "tag",
            "begin": "｜f=x>",
            "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
            "end": "｜",
        }
    ],
}
CALLED = "a ｜f=x>1｜"


@pytest.mark.parametrize(("options", "text", "goes_on", "ends"), [
    ({}, "a ｜f", True, True),
    ({}, "a ｜f=", True, False),
    ({}, "a ｜f=x>3", False, False),
    ({}, CALLED + " b " + CALLED + " c", True, True),
    ({}, CALLED + "｜f=y", False, False),
    ({"stop_after_first": True}, "a", True, True),
    ({"stop_after_first": True}, CALLED, True, True),
    ({"stop_after_first": True}, CALLED + "b", False, False),
    ({"at_least_one": True}, "a", True, False),
    ({"at_least_one": True}, CALLED + " b", True, True),
    ({"at_least_one": True, "stop_after_first": True}, "a", True, False),
    ({"at_least_one": True, "stop_after_first": True}, CALLED, True, True),
])  # fmt: skip
def test_text_is_free_outside_of_triggered_tags(vocabulary, options, text, goes_on, ends):
    form = StructuredOutput.structural_tag({"format": {**TAG, **options}})
    assert taken(vocabulary, form, text) == (goes_on, ends)


FAULTS = [
    (StructuredOutput.json_schema({"type": "nope"}), "at /: Invalid type: nope"),
    (
        StructuredOutput.json_schema({"properties": {"a/b": {"items": {"type": "nope"}}}}),
        "at /properties/a~1b/items: Invalid type",
    ),
    (StructuredOutput.json_schema({"anyOf": [{}, {"$ref": "#/$defs/x"}]}), "at /anyOf/1"),
    (StructuredOutput.json_schema({"$ref": "http://x.example/y"}), "x.example"),
    (StructuredOutput.json_schema({"items": {"uniqueItems": True}}), 'at /items.*"uniqueItems"'),
    (StructuredOutput.json_schema({"not": {}}), 'at /: .*"not"'),
    (StructuredOutput.json_schema({"minimum": 5, "maximum": 2, "type": "integer"}), "minimum .5."),
    (StructuredOutput.json_schema(False), "false"),
    (StructuredOutput.json_schema({"pattern": "(?=x)", "type": "string"}), "look-around"),
    (StructuredOutput.regex("ab(c"), "unclosed group, at character 3"),
    (StructuredOutput.regex("(?<=a)b"), "look-around.*at character 1"),
    (StructuredOutput.grammar("root ::= a"), "GBNF: the rule 'a', which 'root' names"),
    (StructuredOutput.grammar('start: "a" nope'), r"1\(8\).*nope"),
    (StructuredOutput.grammar("no grammar at all"), "cannot be used"),
    (StructuredOutput.structural_tag({}), 'needs "format"'),
    (
        StructuredOutput.structural_tag({"format": {"type": "sequence", "elements": [{}]}}),
        "/format/elements/0",
    ),
]


@pytest.mark.parametrize(("form", "message"), FAULTS, ids=range(len(FAULTS)))
def test_faults_are_named_with_their_place(form, message):
    form = msgspec.structs.replace(form, param="response_format", backend="llguidance")
    with pytest.raises(RequestError, match=message) as caught:
        backends.check(form)
    assert caught.value.param == "response_format"
    assert str(caught.value).startswith("response_format: ")
    assert len(str(caught.value)) < 600


def obj(properties, required=None, **more):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


ROOT, A, B, NULL = {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}
ENDLESS = [
    (ROOT, "# -> #;"),
    ({"$defs": {"a": B, "b": A}, **A}, "satisfies #/$defs/a -> #/$defs/b -> #/$defs/a;"),
    ({"anyOf": [ROOT]}, "# -> #/anyOf/0 -> #;"),
    ({"allOf": [ROOT, NULL]}, "# -> #/allOf/0 -> #;"),
    ({"oneOf": [False, ROOT]}, "# -> #/oneOf/1 -> #;"),
    ({"$defs": {"a": {"anyOf": [B]}, "b": {"oneOf": [A]}}, **A}, "#/$defs/b -> #/$defs/b/oneOf/0"),
    ({"type": "array", "items": {"$ref": "#/items"}}, "#/items -> #/items;"),
    (obj({"next": ROOT}), "# -> #/properties/next -> #;"),
    ({"properties": {"next": ROOT}, "required": ["next"]}, "# -> #/properties/next -> #;"),
    ({"$defs": {"a": B, "b": A}, **obj({"x": A}, [])}, "#/$defs/a -> #/$defs/b"),
    ({"type": "object", "required": ["x"], "additionalProperties": ROOT}, "#/additionalProperties"),
    ({"type": "array", "items": ROOT, "minItems": 1}, "# -> #/items -> #;"),
    ({"type": "array", "prefixItems": [NULL, ROOT], "minItems": 2}, "# -> #/prefixItems/1 -> #;"),
]  # fmt: skip
RECURSIVE = [
    obj({"next": ROOT}, []),
    obj({"next": {"anyOf": [ROOT, NULL]}}),
    {"anyOf": [NULL, {"type": "array", "items": ROOT, "maxItems": 2}]},
    {"type": "array", "items": ROOT},
    {"type": "object", "additionalProperties": ROOT},
    {"$defs": {"a": B, "b": A}, **NULL},
    {"$defs": {"a": obj({"b": B}), "b": obj({"a": A}, [])}, **A},
    {"$defs": {"a b": {"anyOf": [NULL]}}, "$ref": "#/$defs/a%20b/anyOf/0"},
]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("schema", "names"), ENDLESS, ids=range(len(ENDLESS)))
def test_circles_without_a_way_out_are_named(schema, names, backend):
    pytest.importorskip(backend)
    with pytest.raises(RequestError, match="no finite text satisfies") as caught:
        backends.check(StructuredOutput.json_schema(schema, backend=backend))
    assert names in str(caught.value)
    tag = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}
    with pytest.raises(RequestError, match="at /format/elements/0/json_schema: no finite text"):
        backends.check(StructuredOutput.structural_tag({"format": tag}, backend=backend))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("schema", RECURSIVE, ids=range(len(RECURSIVE)))
def test_recursion_with_a_way_out_is_fine(schema, backend, vocabulary):
    pytest.importorskip(backend)
    form = StructuredOutput.json_schema(schema, backend=backend)
    backends.check(form)
    assert any(
        taken(vocabulary, form, text)[1]
        for text in ("{}", '{"next":null}', "null", "[]", '{"b":{}}')
    )


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_damaged_schemas_are_refused_and_no_more(backend):
    pytest.importorskip(backend)
    for schema in (
        {"required": [[1]], "type": "object"},
        {"minItems": "x", "type": "array"},
        {"type": "object", "properties": {"type": "null", "maximum": 5}},
        {"anyOf": {"not": {"properties": {}}}},
        {"type": 5, "minimum": 1},
        {"type": "array", "items": {"anyOf": [[]]}},
    ):
        with pytest.raises(RequestError, match=r"cannot be used|does not keep"):
            backends.check(StructuredOutput.json_schema(schema, backend=backend))
    with pytest.raises(RequestError, match='"format"'):
        backends.check(StructuredOutput.structural_tag("true", backend=backend))


NEXT = {
    "items": lambda ref: {"type": "array", "items": ref},
    "options": lambda ref: obj({"x": {"anyOf": [ref, NULL]}}, []),
}


@pytest.mark.parametrize("way", NEXT)
def test_a_long_chain_of_definitions_ends_no_process(vocabulary, way):
    make, num = NEXT[way], 1800
    links = {f"{i:x}": make({"$ref": f"#/$defs/{i + 1:x}"}) for i in range(num)}
    schema = {"$defs": {**links, f"{num:x}": NULL}, "$ref": "#/$defs/0"}
    form = StructuredOutput.json_schema(schema, backend="llguidance")
    backends.check(form)
    assert taken(vocabulary, form, "[[" if way == "items" else '{"x"')[0]


@pytest.mark.parametrize("line", ["{}: {}", "{} ::= {}"])
def test_a_long_chain_of_rules_ends_no_process(store, vocabulary, line):
    rules = [line.format(f"r{i}", f'"a" r{i + 1}') for i in range(9000)]
    start = line.format("root" if "::=" in line else "start", "r0")
    form = StructuredOutput.grammar("\n".join([start, *rules, line.format("r9000", '"b"')]))
    backends.check(form)
    matcher = store.matcher(form)
    for _ in range(9):
        assert matcher.accept(vocabulary.tokens.index(b"a"))


def test_too_many_references_in_a_row_are_refused():
    for make in (lambda ref: ref, lambda ref: {"allOf": [ref, {"properties": {"x": {}}}]}):
        links = {f"{i:x}": make({"$ref": f"#/$defs/{i + 1:x}"}) for i in range(2500)}
        schema = {"$defs": {**links, f"{2500:x}": NULL}, "$ref": "#/$defs/0"}
        with pytest.raises(RequestError, match="too many references in a row"):
            backends.check(StructuredOutput.json_schema(schema))


def test_references_that_meet_again_are_followed_once():
    twice = {f"{i:x}": {"allOf": [{"$ref": f"#/$defs/{i + 1:x}"}] * 2} for i in range(40)}
    schema = {"$defs": {**twice, f"{40:x}": obj({"a": NULL})}, "$ref": "#/$defs/0"}
    closed = prepare(json.loads(json.dumps(schema)), is_closed=False)
    assert closed["$defs"]["0"]["properties"] == {"a": True}


BROKEN = [
    (lambda: StructuredOutput.json_schema("{"), "not JSON"),
    (lambda: StructuredOutput.json_schema("[1]"), "must be an object"),
    (lambda: StructuredOutput.json_schema({"const": float("nan")}), "not JSON"),
    (lambda: StructuredOutput.regex(""), "empty"),
    (lambda: StructuredOutput.regex("a\0"), "NUL"),
    (lambda: StructuredOutput.regex(5), "must be a text"),
    (lambda: StructuredOutput.regex("x" * (MAX_BYTES + 1)), f"at most {MAX_BYTES}"),
    (lambda: StructuredOutput.choice([]), "1 to 10000"),
    (lambda: StructuredOutput.choice(["a", ""]), r"choice\[1\]"),
    (lambda: StructuredOutput(kind="poem", text="x"), "kind is 'poem'"),
    (lambda: StructuredOutput.json_object(backend="outlines"), "backend is 'outlines'"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_form(make, message):
    with pytest.raises(RequestError, match=message):
        make()


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_too_deep_says_where(depth):
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(RequestError, match="deeper than 64 levels at /"):
        StructuredOutput.json_schema(text)


def test_forms_cross_processes():
    params = SamplingParams(structured=StructuredOutput.regex("a+", is_compact=True))
    raw = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(raw, type=SamplingParams) == params


@pytest.mark.parametrize(
    "pattern", ["(a{1,1000}){1,1000}", "(x+x+)+y", "((a|b)*c){1,5000}", "(.*a){30}", "a{100000}"]
)
def test_patterns_that_explode_elsewhere(pattern, store):
    form = StructuredOutput.regex(pattern)
    backends.check(form)
    matcher = store.matcher(form)
    for _ in range(3):
        [token, *_] = sorted(allowed(matcher) - {EOS})
        assert matcher.accept(token)


# ---- schemas ----


X = {"$ref": "#/$defs/x"}
OPEN = {"type": "object", "properties": {"a": {}}}
SHUT = {**OPEN, "additionalProperties": False}
CLOSED = {
    "a list of properties": (OPEN, SHUT),
    "no type": ({"properties": {"a": {}}}, SHUT),
    "one that is required only": (
        {**OPEN, "required": ["b"]},
        {**SHUT, "properties": {"a": {}, "b": True}, "required": ["b"]},
    ),
    "inside": (
        {"type": "array", "items": {"anyOf": [OPEN, NULL]}, "prefixItems": [OPEN]},
        {"type": "array", "items": {"anyOf": [SHUT, NULL]}, "prefixItems": [SHUT]},
    ),
    "beside patterns": (
        {**OPEN, "patternProperties": {"^x": OPEN}},
        {**SHUT, "patternProperties": {"^x": SHUT}},
    ),
    "allOf": (
        {"allOf": [OPEN, {"properties": {"b": OPEN}}]},
        {
            "allOf": [OPEN, {"properties": {"b": SHUT}}],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    ),
    "a reference in allOf": (
        {"$defs": {"x": OPEN}, "allOf": [X, {"properties": {"b": X}}]},
        {
            "$defs": {"x": SHUT, "open-1": OPEN},
            "allOf": [{"$ref": "#/$defs/open-1"}, {"properties": {"b": X}}],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    ),
    "allOf of one": (
        {"$defs": {"x": OPEN}, "properties": {"y": {"allOf": [X], "title": "t"}}},
        {
            "$defs": {"x": SHUT},
            "type": "object",
            "properties": {"y": {"allOf": [X], "title": "t"}},
            "additionalProperties": False,
        },
    ),
    "anyOf beside properties": (
        {**OPEN, "anyOf": [{"properties": {"b": {}}}, {"required": ["c"]}]},
        {
            **OPEN,
            "anyOf": [
                {"properties": {"b": {}, "a": True}, "additionalProperties": False},
                {
                    "required": ["c"],
                    "properties": {"a": True, "c": True},
                    "additionalProperties": False,
                },
            ],
        },
    ),
    "anyOf beside oneOf": (
        {"anyOf": [{"properties": {"a": {}}}], "oneOf": [{"properties": {"b": {}}}]},
        {
            "anyOf": [{"properties": {"a": {}}}],
            "oneOf": [{"properties": {"b": {}}}],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_what_lists_its_properties_has_no_others(name):
    given, closed = CLOSED[name]
    assert prepare(json.loads(json.dumps(given)), is_closed=False) == closed


STAYS = [
    {"type": "object"},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {}},
    {**OPEN, "additionalProperties": True},
    {**OPEN, "additionalProperties": NULL},
    {**OPEN, "unevaluatedProperties": True},
    {**OPEN, "minProperties": 2},
    {"allOf": [OPEN, {"additionalProperties": True}]},
    {"allOf": [OPEN, {"patternProperties": {"^x": {}}}]},
    {"$defs": {"x": {**OPEN, "additionalProperties": {}}}, "allOf": [OPEN, X]},
    {"properties": [1], "allOf": 5, "anyOf": {}, "$ref": 3, "required": 7},
    True,
]


@pytest.mark.parametrize("schema", STAYS, ids=range(len(STAYS)))
def test_what_is_said_to_be_open_stays_open(schema):
    assert prepare(json.loads(json.dumps(schema)), is_closed=False) == schema


def test_strict_closes_an_empty_list_too():
    empty = {"type": "object", "properties": {}}
    assert prepare(dict(empty), is_closed=True) == {**empty, "additionalProperties": False}
    for schema in ({"type": "object"}, {"properties": {}, "additionalProperties": True}):
        assert prepare(dict(schema), is_closed=True) == schema


def test_unknown_formats_are_annotations():
    schema = prepare(obj({"format": {"format": "color"}, "d": {"format": "date"}}), is_closed=False)
    assert schema["properties"] == {"format": {}, "d": {"format": "date"}}


def test_the_smallest_part_with_a_fault():
    schema = {"properties": {"a": {"items": {"bad": 1}}, "b": {}}}
    assert find_fault(schema, lambda part: "bad" if "'bad'" in str(part) else "") == (
        "/properties/a/items",
        "bad",
    )


JOINED = {
    "$defs": {
        "pet": obj({"name": {"type": "string"}, "friend": {"$ref": "#/$defs/cat"}}, ["name"]),
        "cat": {"allOf": [{"$ref": "#/$defs/pet"}, obj({"lives": {"type": "integer"}})]},
    },
    "$ref": "#/$defs/cat",
}
CAT = '{"name":"a",%s"lives":9}'


def test_joined_objects_are_closed_where_they_are_used(vocabulary):
    form = StructuredOutput.json_schema(JOINED)
    for text, is_whole in [
        (CAT % "", True),
        (CAT % ('"friend":' + CAT % "" + ","), True),
        ('{"name":"a"}', False),
        ('{"name":"a","lives":9,"x":1}', False),
    ]:
        assert taken(vocabulary, form, text)[1] == is_whole, text


SPACES = {
    "": (True, True),
    " ": (True, True),
    "\n": (True, True),
    "\n ": (True, True),
    "\n\t": (True, True),
    "\n" + " " * 32: (True, False),
    "\n" + " " * 33: (False, False),
    "\n\n\n": (False, False),
    " " * 3: (False, False),
    "\r": (False, True),
}


@pytest.mark.parametrize("space", SPACES)
def test_white_space_between_tokens_is_bounded(vocabulary, space):
    for backend, is_fine in zip(("llguidance", "xgrammar"), SPACES[space], strict=True):
        pytest.importorskip(backend)
        schema = obj(
            {"a": {"type": "array", "items": {"type": "integer"}}}, additionalProperties=False
        )
        tag = {"type": "json_schema", "json_schema": schema}
        forms = [
            StructuredOutput.json_schema(schema, backend=backend),
            StructuredOutput.json_object(backend=backend),
            StructuredOutput.structural_tag({"format": tag}, backend=backend),
        ]
        for form in forms:
            gaps = ('{%s"a":[1,2]}', '{"a":%s[1,2]}', '{"a":[1,%s2]}', '{"a":[1,2]%s}')
            found = {taken(vocabulary, form, text % space)[1] for text in gaps}
            assert found == {is_fine}, (backend, form.kind)


def test_compact_json_has_no_white_space_in_a_tag_either(vocabulary):
    tag = {"format": {"type": "json_schema", "json_schema": {"type": "array"}}}
    form = StructuredOutput.structural_tag(tag, is_compact=True)
    assert taken(vocabulary, form, "[1,2]") == (True, True)
    assert taken(vocabulary, form, "[1, 2]") == (False, False)


# ---- the store ----


def test_compilation_happens_once_and_elsewhere(vocabulary):
    started, go_on = threading.Event(), threading.Event()
    threads = []

    def slow_vocabulary():
        threads.append(threading.current_thread())
        started.set()
        assert go_on.wait(20)
        return vocabulary

    store, woken = GrammarStore(slow_vocabulary), threading.Event()
    store.on_ready(woken.set)
    params = SamplingParams(structured=StructuredOutput.choice(["a"]))
    pending = store.start(params)
    assert started.wait(20)
    assert not pending.done()
    assert store.start(SamplingParams()) is None
    go_on.set()
    assert woken.wait(20)
    store.wait(20)
    assert pending.done()
    assert store.start(params) is pending
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_the_cache_is_bounded_and_keyed_by_form(store):
    forms = [StructuredOutput.choice([f"x{i}"]) for i in range(10)]
    for form in forms:
        store.matcher(form)
    assert len(store._recent) == 4
    gc.collect()
    assert len(store._held) == 4
    again = msgspec.structs.replace(forms[-1], param="elsewhere")
    assert store.start(SamplingParams(structured=again)).done()


def test_more_forms_than_the_cache_holds_all_become_ready(new_core, vocabulary):
    go_on = threading.Event()

    def slow_vocabulary():
        assert go_on.wait(20)
        return vocabulary

    store, core = GrammarStore(slow_vocabulary, max_grammars=4), new_core()
    core.scheduler.pending_grammars = store
    forms = [StructuredOutput.choice([f"x{i}"]) for i in range(10)]
    for index, form in enumerate(forms):
        core.add_request(make_request(f"r{index}", structured=form, max_tokens=2))
    assert len(core.scheduler.blocked) == 10
    compiled = [request.pending_grammar for request in core.scheduler.requests.values()]
    go_on.set()
    wait(compiled, timeout=20)
    assert [store.start(SamplingParams(structured=form)) for form in forms] == compiled
    assert len(run_to_end(core)) == 10


def test_a_form_that_cannot_be_compiled_keeps_its_error(store):
    form = StructuredOutput.grammar("start: <[9999]>")
    backends.check(form)  # control tokens are looked up with the vocabulary
    for _ in range(2):
        with pytest.raises(RequestError, match="could not be compiled"):
            store.matcher(form)


class Damaged:
    """A library's backend, grammar and matcher at once; `place` raises."""

    is_stopped, error = False, ""

    def __init__(self, place):
        self._place, self.backend = place, self

    def _do(self, place):
        if place == self._place:
            raise KeyError("the library is damaged")

    def compile(self, structured):
        self._do("compile")
        return self

    def matcher(self):
        self._do("matcher")
        return self

    def accept(self, token_id):
        self._do("accept")
        return True


@pytest.mark.parametrize("place", ["compile", "matcher", "accept"])
def test_what_a_library_raises_ends_its_request_alone(store, monkeypatch, place):
    monkeypatch.setattr(store, "_backend", lambda name: Damaged(place))
    rows = grammar_rows(store)
    rows.update(plan([request("bad", StructuredOutput.choice(["ab"]))]))
    errors = accept(rows, ["bad", "free"], [7, 7])
    assert list(errors) == ["bad"]
    assert "the library is damaged" in errors["bad"]


def test_a_model_without_the_means(tmp_path):
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, VOCAB, (EOS,))
    (tmp_path / "tokenizer.json").write_text(_trained_byte_level())
    with pytest.raises(RequestError, match="end-of-sequence"):
        read_vocabulary(tmp_path, VOCAB, ())


def grammar_rows(store):
    return GrammarRows(store, VOCAB, RowFailures())


def accept(rows, ids, tokens):
    """Move matchers on; why requests have failed."""
    rows.accept(ids, torch.tensor(tokens))
    return rows._failures.texts(ids)


# ---- matchers ----


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_matcher_follows_its_form(store, vocabulary, backend):
    pytest.importorskip(backend)
    matcher = store.matcher(StructuredOutput.choice(["ab", "ac"], backend=backend))
    a, b, c = (vocabulary.encode(text)[0] for text in "abc")
    assert a in allowed(matcher)
    assert EOS not in allowed(matcher)
    assert matcher.accept(a)
    assert {b, c} <= allowed(matcher)
    assert matcher.accept(b)
    assert allowed(matcher) == {EOS}
    assert not matcher.is_stopped
    assert matcher.accept(EOS)
    assert matcher.is_stopped


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_matcher_refuses_and_says_why(store, vocabulary, backend):
    pytest.importorskip(backend)
    matcher = store.matcher(StructuredOutput.choice(["ab"], backend=backend))
    assert not matcher.accept(vocabulary.encode("x")[0])
    assert matcher.error


def test_free_text_has_no_control_tokens(store, vocabulary):
    matcher = store.matcher(StructuredOutput.regex("(.|\\n)*"))
    assert not (allowed(matcher) - {EOS}) & vocabulary.special_ids
    plain = vocabulary.encoder.token_to_id("<tool call>")
    assert plain in allowed(matcher)  # an added token that is text


# ---- rows ----


def plan(new=(), finished=(), preempted=()):
    return SchedulerOutput(0, tuple(new), (), {}, tuple(finished), tuple(preempted))


def request(request_id, form, output=()):
    params = SamplingParams(structured=form)
    return NewRequest(request_id, [5, 6, *output], 2, params, (EOS,), [1], 0)


def mask_of(rows, ids):
    constraint = rows.constrain(ids)
    assert constraint is not None
    places, words = constraint
    bits = unpack_mask(words, VOCAB)
    return {
        ids[place]: set(bits[i].nonzero()[:, 0].tolist()) for i, place in enumerate(places.tolist())
    }


def test_rows_with_and_without_a_form(store):
    rows = grammar_rows(store)
    rows.update(plan([request("a", StructuredOutput.choice(["ab"])), request("free", None)]))
    assert set(mask_of(rows, ["free", "a"])) == {"a"}
    assert rows.constrain(["free"]) is None
    rows.update(plan(finished=["a"]))
    assert len(rows) == 0
    assert rows.constrain(["free"]) is None


def test_a_request_that_comes_back_goes_on_where_it_was(store, vocabulary):
    rows, form = grammar_rows(store), StructuredOutput.regex("[ab]{3}x")
    rows.update(plan([request("a", form)]))
    a, b = (vocabulary.encode(text)[0] for text in "ab")
    for token in (a, b):
        assert accept(rows, ["a"], [token]) == {}
    before = mask_of(rows, ["a"])["a"]
    accept(rows, ["a"], [a])  # this result is dropped: the request was preempted
    rows.update(plan(preempted=["a"]))
    rows.update(plan([request("a", form, [a, b])]))
    assert mask_of(rows, ["a"])["a"] == before


def test_one_that_cannot_go_on_ends_alone(store, vocabulary):
    rows, form = grammar_rows(store), StructuredOutput.choice(["ab"])
    rows.update(plan([request("good", form), request("bad", form)]))
    a, x = (vocabulary.encode(text)[0] for text in "ax")
    errors = accept(rows, ["good", "bad"], [a, x])
    assert list(errors) == ["bad"]
    assert "cannot keep its form" in errors["bad"]


def test_a_form_that_fails_to_compile_ends_its_request(store):
    rows = grammar_rows(store)
    rows.update(plan([request("bad", StructuredOutput.grammar("start: <[9999]>"))]))
    assert "could not be compiled" in accept(rows, ["bad"], [7])["bad"]


def test_tokens_after_the_end_are_not_looked_at(store, vocabulary):
    rows = grammar_rows(store)
    rows.update(plan([request("a", StructuredOutput.choice(["a"]))]))
    for token in (vocabulary.encode("a")[0], EOS, 7, 8):
        assert accept(rows, ["a"], [token]) == {}
    assert rows.constrain(["a"]) is None


# ---- masks ----


@pytest.mark.parametrize("size", [1, 31, 32, 33, 424])
def test_unpacking(size):
    bits = np.random.default_rng(size).integers(0, 2, (3, size)).astype(bool)
    padded = np.zeros((3, -(-size // 32) * 32), bool)
    padded[:, :size] = bits
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    assert np.array_equal(unpack_mask(torch.from_numpy(words), size).numpy(), bits)


def words_for(token_ids, size=64):
    bits = np.zeros((1, size), bool)
    bits[0, list(token_ids)] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_masked_rows_are_held(temperature):
    logits = torch.arange(64.0).repeat(3, 1)
    inputs = SamplingInputs(
        grammar=(torch.tensor([1]), words_for([5, 9])),
        temperature=torch.full((3,), temperature) if temperature else None,
        uniform=torch.full((3,), 0.5, dtype=torch.float64) if temperature else None,
    )
    tokens = sample(logits, inputs).token_ids.tolist()
    assert tokens[1] == 9
    assert {tokens[0], tokens[2]} <= {62, 63}


def test_a_ban_of_all_that_is_left_is_ignored():
    logits = torch.arange(64.0).repeat(2, 1)
    banned = (torch.tensor([0, 0, 1]), torch.tensor([5, 9, 63]))
    grammar = (torch.tensor([0]), words_for([5, 9]))
    tokens = sample(logits, SamplingInputs(grammar=grammar, banned=banned)).token_ids
    assert tokens.tolist() == [9, 62]


def test_the_form_in_bias_and_logprobs():
    """A bias still counts among what is left; logprobs are those of the raw logits."""
    logits = torch.zeros(1, 64)
    bias = (torch.tensor([0, 0]), torch.tensor([5, 20]), torch.tensor([3.0, 50.0]))
    inputs = SamplingInputs(
        grammar=(torch.tensor([0]), words_for([5, 9])), bias=bias, num_logprobs=(0,)
    )
    output = sample(logits, inputs)
    assert output.token_ids.tolist() == [5]
    assert output.logprobs[0].logprob == pytest.approx(-np.log(64), abs=1e-5)
