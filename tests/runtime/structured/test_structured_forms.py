"""Forms: what they let through, and their faults with the place."""

from __future__ import annotations

import json

import msgspec
import pytest
from support_grammars import EOS, NULL, allowed, obj, taken

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import MAX_BYTES, StructuredOutput
from girih.runtime.structured import backends
from girih.runtime.structured.closing import prepare

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


ROOT, A, B = {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
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
