"""Schemas are closed, joined and bounded before a grammar is made of them."""

from __future__ import annotations

import json

import pytest
from support_grammars import NULL, obj, taken

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.closing import prepare
from girih.runtime.structured.schema import find_fault

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
