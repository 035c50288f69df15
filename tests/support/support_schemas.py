"""JSON schemas by feature: leaves, the ways to put them together, and what only exists whole."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

LEAVES: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 12},
    "min_length": {"type": "string", "minLength": 3, "maxLength": 6},
    "exact_length": {"type": "string", "minLength": 4, "maxLength": 4},
    "empty_string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}$"},
    "pattern_digits": {"type": "string", "pattern": "^\\d{3}-\\d{2}$"},
    "pattern_choice": {"type": "string", "pattern": "^(red|green|blue)$"},
    "pattern_unicode": {"type": "string", "pattern": "^[äöü]{1,3}$"},
    "pattern_escape": {"type": "string", "pattern": '^\\{"a\\\\b"\\}$'},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date_time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "unknown_format": {"type": "string", "format": "color", "maxLength": 5},
    "integer": {"type": "integer", "minimum": -999, "maximum": 999},
    "minimum": {"type": "integer", "minimum": 17, "maximum": 23},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "negative": {"type": "integer", "minimum": -30, "maximum": -12},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9999},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "number_exclusive": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["boolean", "null"]},
    "types_with_string": {
        "type": ["string", "integer"],
        "maxLength": 4,
        "minimum": 0,
        "maximum": 9,
    },
    "enum": {"enum": ["a", 1, None, True, {"b": [2.5]}]},
    "enum_typed": {"type": "string", "enum": ["north", "south"]},
    "enum_escapes": {"enum": ['quote " here', "back\\slash", "new\nline", "é😀"]},
    "const": {"const": "always"},
    "const_object": {"const": {"x": [1, {"y": None}]}},
    "annotated": {"type": "boolean", "title": "T", "description": "d", "default": True},
    "any_of": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "one_of": {"oneOf": [{"type": "boolean"}, {"const": "x"}]},
    "all_of": {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 50}]},
    "nullable": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
}

BOOL: Schema = {"type": "boolean"}
SHORT: Schema = {"type": "string", "maxLength": 4}


def closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties only, all required unless said otherwise."""
    names = list(properties) if required is None else required
    body = {"type": "object", "properties": properties, "required": names}
    return {**body, "additionalProperties": False, **more}


WRAPPERS = {
    "property": lambda leaf: closed({"value": leaf}),
    "optional": lambda leaf: closed({"first": BOOL, "value": leaf}, ["first"]),
    "items": lambda leaf: {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3},
    "reference": lambda leaf: {"$defs": {"leaf": leaf}, **closed({"v": {"$ref": "#/$defs/leaf"}})},
}

TREE: Schema = {
    "$defs": {
        "node": closed(
            {
                "leaf": BOOL,
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            }
        )
    },
    "$ref": "#/$defs/node",
}

WHOLE: dict[str, Schema] = {
    "tuple": {
        "type": "array",
        "prefixItems": [BOOL, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "tuple_old": {"type": "array", "items": [BOOL, {"const": 1}], "additionalItems": False},
    "tuple_with_rest": {
        "type": "array",
        "prefixItems": [BOOL],
        "items": {"const": 0},
        "maxItems": 3,
    },
    "no_items": {"type": "array", "maxItems": 0},
    "exact_items": {"type": "array", "items": BOOL, "minItems": 3, "maxItems": 3},
    "nested_arrays": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "items": BOOL, "maxItems": 2},
    },
    "empty_object": {"type": "object", "properties": {}, "additionalProperties": False},
    "many_properties": closed({f"p{i}": BOOL for i in range(12)}),
    "all_optional": closed({"a": BOOL, "b": BOOL, "c": BOOL}, []),
    "odd_names": closed({'a"b': BOOL, "c\\d": BOOL, "é😀": BOOL, "": BOOL}),
    "map_of_booleans": {
        "type": "object",
        "additionalProperties": BOOL,
        "minProperties": 1,
        "maxProperties": 2,
        "propertyNames": True,
    },
    "pattern_properties": {
        "type": "object",
        "patternProperties": {"^x_[a-c]$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "named_and_others": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["id"],
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    },
    "nested_objects": closed({"a": closed({"b": closed({"c": BOOL})})}),
    "all_of_objects": {
        "allOf": [
            {"type": "object", "properties": {"a": BOOL}, "required": ["a"]},
            {"properties": {"b": SHORT}, "required": ["b"], "maxProperties": 2},
        ]
    },
    "any_of_objects": {"anyOf": [closed({"a": BOOL}), closed({"b": SHORT})]},
    "tagged_union": {
        "oneOf": [
            closed({"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}}),
            closed({"kind": {"const": "dog"}, "name": SHORT}),
        ]
    },
    "tree": TREE,
    "linked_list": closed({"v": BOOL, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "mutual": {
        "$defs": {
            "a": closed({"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}),
            "b": closed({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}),
        },
        "$ref": "#/$defs/a",
    },
    "definitions": {"definitions": {"flag": BOOL}, **closed({"f": {"$ref": "#/definitions/flag"}})},
    "pointer_escapes": {"$defs": {"a/b~c": BOOL}, **closed({"f": {"$ref": "#/$defs/a~1b~0c"}})},
    "reference_to_property": closed({"a": SHORT, "b": {"$ref": "#/properties/a"}}),
    "array_of_objects": {
        "type": "array",
        "items": closed({"a": BOOL}),
        "minItems": 1,
        "maxItems": 2,
    },
    "object_of_arrays": closed({"a": {"type": "array", "items": BOOL, "maxItems": 2}}),
    "untyped_bounds": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    "enum_with_bounds": {"enum": [1, 5, 12], "minimum": 3},
    "const_in_all_of": {"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
    "deep": {},
    "person": closed(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        ["name", "age"],
    ),
}


def _deep(levels: int) -> Schema:
    schema: Schema = BOOL
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return schema


WHOLE["deep"] = _deep(20)
WHOLE["map_of_booleans"].pop("propertyNames")


def all_schemas() -> dict[str, Schema]:
    """Every schema by a name that says what it is about."""
    wrapped = {
        f"{wrapper}-{leaf}": make(schema)
        for wrapper, make in WRAPPERS.items()
        for leaf, schema in LEAVES.items()
    }
    return {**LEAVES, **wrapped, **WHOLE}
