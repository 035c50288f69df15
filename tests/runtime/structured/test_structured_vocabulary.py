"""Vocabularies spell their tokens, and names of control tokens are text."""

from __future__ import annotations

import dataclasses

import pytest
import tokenizers
from support_grammars import taken, written
from support_tokenizer import _trained_byte_level

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured import backends

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
