"""Matchers follow their forms, and the rows of a step hold them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_grammars import EOS, VOCAB, accept, allowed, grammar_rows, plan, request

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.sample.mask import unpack_mask
from girih.runtime.sample.sampler import SamplingInputs, sample


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
