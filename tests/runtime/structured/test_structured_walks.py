"""Whatever a grammar library lets through satisfies the schema; what it would miss is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from support_schemas import LEAVES, WHOLE, WRAPPERS, all_schemas
from support_tokenizer import _trained_byte_level

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured import backends
from girih.runtime.structured.vocabulary import read_vocabulary

VOCAB, EOS = 424, 2
BACKENDS = ("llguidance", "xgrammar")
GROUPS = ("leaves", *WRAPPERS, "whole")


class Walker:
    """Writes random texts of a form."""

    def __init__(self, path):
        (path / "tokenizer.json").write_text(_trained_byte_level())
        self.vocabulary = read_vocabulary(path, VOCAB, (EOS,))
        words = self.vocabulary.tokens
        self.weights = np.ones(VOCAB)
        self.weights[[i for i, word in enumerate(words) if not word.strip()]] = 0.05
        self.weights[[i for i, word in enumerate(words) if word in (b'"', b"}", b"]")]] = 80
        self.weights[EOS] = 50
        self.libraries = {}

    def library(self, name):
        if name not in self.libraries:
            self.libraries[name] = backends.load(name).make_backend(self.vocabulary, 1)
        return self.libraries[name]

    def write(self, form, seed):
        """A text, and whether it came to its end."""
        matcher = self.library(form.backend).compile(form).matcher()
        rng, text = random.Random(seed), b""
        mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
        for _ in range(400):
            matcher.backend.fill([matcher], [0], mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, (text, matcher.error)
            [token] = rng.choices(allowed, self.weights[allowed])
            assert matcher.accept(token), (text, matcher.error)
            if matcher.is_stopped:
                break
            text += self.vocabulary.tokens[token]
        return text.decode("utf-8", "replace"), matcher.is_stopped


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    return Walker(tmp_path_factory.mktemp("vocabulary"))


def schemas_of(group):
    if group in ("leaves", "whole"):
        return dict(LEAVES if group == "leaves" else WHOLE)
    return {n: s for n, s in all_schemas().items() if n.startswith(f"{group}-")}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", GROUPS)
def test_texts_validate(walker, group, backend):
    pytest.importorskip(backend)
    for name, schema in schemas_of(group).items():
        form = StructuredOutput.json_schema(schema, backend=backend)
        try:
            backends.check(form)
        except RequestError as error:
            assert backend == "xgrammar", name
            assert "choose llguidance" in str(error), name
            continue
        text, is_whole = walker.write(form, 1)
        assert is_whole, (name, text)
        validator = Draft7Validator if name == "tuple_old" else Draft202012Validator
        validator(schema).validate(json.loads(text))


MISSED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "null"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "null"}, "then": True},
    "allOf with more than one schema": {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    "minProperties beside $ref": {"$defs": {"a": {}}, "$ref": "#/$defs/a", "minProperties": 1},
    "type beside anyOf": {"type": "string", "anyOf": [{"type": "string"}]},
    "minimum beside enum": {"enum": [1, 5], "minimum": 3},
    "type beside '1'": {"type": "string", "enum": ["a", 1]},
    "an empty anyOf": {"anyOf": []},
    "required 'b'": {"type": "object", "required": ["b"], "additionalProperties": {}},
    "minLength without a type": {"minLength": 2},
    "maxLength beside pattern": {"type": "string", "pattern": "^a+$", "maxLength": 2},
    "pattern beside format": {"type": "string", "pattern": "^a", "format": "date"},
    "maxLength 257": {"type": "string", "maxLength": 257},
    "minLength x": {"type": "string", "minLength": "x"},
    "multipleOf 0.5": {"type": "number", "multipleOf": 0.5},
    "multipleOf 1025": {"type": "integer", "multipleOf": 1025},
    "the reference '#x'": {"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"},
    "quotes or backslashes": {"type": "string", "pattern": '^"$'},
    "minimum -9223372036854775808": {"type": "integer", "minimum": -(2**63)},
    "const 9223372036854775808": {"const": [{"a": 2**63}]},
}


@pytest.mark.parametrize("what", MISSED)
def test_xgrammar_refuses_what_it_would_miss(what):
    pytest.importorskip("xgrammar")
    schema = {"type": "array", "items": MISSED[what], "$defs": MISSED[what].get("$defs", {})}
    with pytest.raises(RequestError, match="xgrammar does not keep") as caught:
        backends.check(StructuredOutput.json_schema(schema, backend="xgrammar"))
    assert f"{what}, at /items; choose llguidance" in str(caught.value)
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(RequestError, match="at /items of /format/json_schema"):
        backends.check(StructuredOutput.structural_tag(tag, backend="xgrammar"))


OBJECTS = {
    "a list": ({"type": "object", "properties": {"a": {"const": 1}}}, False),
    "an empty list": ({"type": "object", "properties": {}}, True),
    "no list": ({"type": "object"}, True),
    "said to be open": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}, True
    ),
    "a list and patterns": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", OBJECTS)
def test_both_close_the_same_objects(walker, what, backend):
    pytest.importorskip(backend)
    schema, is_open = OBJECTS[what]
    form = StructuredOutput.json_schema(schema, backend=backend)
    backends.check(form)
    for text, is_fine in (('{"a":1}', True), ('{"q":2}', is_open)):
        matcher = walker.library(backend).compile(form).matcher()
        ids = [walker.vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
        is_taken = all(map(matcher.accept, [*ids, EOS]))
        assert is_taken == (is_fine or (what, text) == ("no list", text)), text


# ---- integers ----

INTEGERS = [
    s * (n + d) for n in (2**53, 2**60, 2**63) for d in (-1025, -1, 0, 1, 2) for s in (1, -1)
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"]
)
def test_large_integers_are_exact_or_refused(walker, name, backend):
    pytest.importorskip(backend)
    num_kept = 0
    for bound in INTEGERS:
        form = StructuredOutput.json_schema({"type": "integer", name: bound}, backend=backend)
        try:
            backends.check(form)
        except RequestError:
            continue
        num_kept += 1
        for value in (bound - 1, bound, bound + 1):
            ids = [walker.vocabulary.tokens.index(bytes([byte])) for byte in str(value).encode()]
            matcher = walker.library(backend).compile(form).matcher()
            is_taken = all(map(matcher.accept, [*ids, EOS]))
            is_right = {
                "minimum": value >= bound, "maximum": value <= bound, "const": value == bound,
                "exclusiveMinimum": value > bound, "exclusiveMaximum": value < bound,
            }[name]  # fmt: skip
            # The very ends of int64 may be out of reach.
            assert is_taken == is_right or (is_right and abs(value) > 2**63 - 1026), (bound, value)
    assert num_kept > (20 if backend == "xgrammar" else 5)


def test_the_library_is_chosen_by_what_it_keeps():
    exact = StructuredOutput.json_schema({"type": "integer", "minimum": 2**53 + 1})
    with pytest.raises(
        RequestError, match=r"round minimum 9007199254740993, at /: .*girih\[xgrammar"
    ):
        backends.check(StructuredOutput.json_schema(exact.text, backend="llguidance"))
    if backends.is_installed("xgrammar"):
        assert backends.choose(exact) == "xgrammar"
    whole = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert backends.choose(StructuredOutput.json_schema(whole)) == "llguidance"
    backends.check(StructuredOutput.json_schema(whole))
    both = {"type": "array", "uniqueItems": True, "items": {"const": 2**53 + 1}}
    with pytest.raises(RequestError, match="would round const"):
        backends.check(StructuredOutput.json_schema(both))
