import itertools

import pytest
import support_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.serve.text.detokenizer import Detokenizer, StopMatcher, decode_output, make_decoder

TOKENIZERS = {
    "byte_level": support_tokenizer.byte_level(),
    "byte_fallback": support_tokenizer.byte_fallback(),
}
SAMPLES = [
    "Hello, world",
    "你好，世界！",
    "😀 👨‍👩‍👧 🇮🇳",
    "café naïve",
    "a\n  b",
    "\ufffd x",
    "x y z ",
]


def pieces_of(tokenizer, ids, skip):
    decoder = make_decoder(tokenizer, skip)
    pieces = [decoder.push(token_id) for token_id in ids]
    return [*pieces, decoder.flush()]


def test_kinds_are_recognised():
    assert TOKENIZERS["byte_level"].is_byte_level
    fallback = TOKENIZERS["byte_fallback"]
    assert not fallback.is_byte_level
    assert any(fallback.is_byte_token(i) for i in fallback.encode("你"))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_deltas_of_random_ids_concatenate_to_the_whole_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    text = "".join(pieces_of(tokenizer, ids, skip))
    assert text == support_tokenizer.whole_text(tokenizer, ids, skip)
    decoded = tokenizer.decode(ids, skip)
    assert decoded == text or decoded.endswith("\ufffd")


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=6))).map("".join))
@settings(max_examples=150, deadline=None)
def test_no_delta_ends_inside_a_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, True)
    assert "".join(pieces) == tokenizer.decode(ids)
    # A replacement character appears only where the text itself has one.
    assert "".join(pieces).count("\ufffd") == tokenizer.decode(ids).count("\ufffd")
    assert sum(p.count("\ufffd") for p in pieces) <= text.count("\ufffd")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["🛸", "a🛸", "é🛸", "👨‍👩‍👧🛸", "🛸🛸"])
def test_half_a_character_at_the_end_is_dropped(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    half = ids[:-1]
    assert tokenizer.decode(half).endswith("\ufffd")
    assert "".join(pieces_of(tokenizer, half, True)) == text[:-1]
    assert decode_output(tokenizer, half) == text[:-1]
    detokenizer = Detokenizer(tokenizer, stop=["\ufffd"])
    step, last = detokenizer.push(half), detokenizer.finish()
    assert (step.text + last.text, last.stop) == (text[:-1], None)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_half_a_character_inside_the_text_is_a_replacement_character(kind):
    tokenizer = TOKENIZERS[kind]
    half = tokenizer.encode("🛸", add_special_tokens=False)[:-1]
    ids = [*half, *tokenizer.encode("b", add_special_tokens=False)]
    text = "".join(pieces_of(tokenizer, ids, True))
    assert text == tokenizer.decode(ids)
    assert text.startswith("\ufffd")
    assert text.endswith("b")


def test_the_first_space_after_a_prompt_is_kept():
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt = tokenizer.encode("one two")
    answer = tokenizer.encode("three")  # begins with a word mark
    after = make_decoder(tokenizer, True, context=prompt)
    assert "".join(map(after.push, answer)) + after.flush() == " three"
    alone = make_decoder(tokenizer, True)
    assert "".join(map(alone.push, answer)) + alone.flush() == "three"


def oracle(text, stops, include, armed_from):
    """Read character by character; the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        if end - 1 < armed_from:
            continue
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 24), max_size=6),
    armed_from=st.integers(0, 10),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, include, cuts, armed_from):
    expected, expected_stop = oracle(text, stops, include, armed_from)
    matcher = StopMatcher(stops, include)
    bounds = sorted({0, len(text), min(armed_from, len(text)), *(c for c in cuts if c < len(text))})
    shown, found = "", None
    for start, end in itertools.pairwise(bounds):
        piece, found = matcher.push(text[start:end], armed=start >= armed_from)
        shown += piece
        assert expected.startswith(shown), "text of a stop string was shown"
        if found:
            break
    if not found:
        shown += matcher.flush()
    assert (shown, found) == (expected, expected_stop)


def test_tokens_after_a_stop_string_do_not_count():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    step = Detokenizer(tokenizer, stop=["two"]).push(ids)
    assert (step.text, step.stop) == ("one ", "two")
    assert step.num_tokens < len(ids)
    kept = Detokenizer(tokenizer, stop=["two"], include_stop=True).push(ids)
    assert kept.text == "one two"


def test_min_tokens_lets_early_stop_strings_pass():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("x " * 6, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["x"], min_tokens=4)
    step = detokenizer.push(ids)
    assert step.stop == "x"
    assert step.num_tokens >= 4
    assert step.text.count("x") == tokenizer.decode(ids[: step.num_tokens]).count("x") - 1


def test_held_text_is_given_back_when_the_output_ends():
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=["tw!"])
    shown = detokenizer.push(tokenizer.encode("one tw", add_special_tokens=False)).text
    assert shown == "one "
    assert shown + detokenizer.finish().text == "one tw"


@pytest.mark.real_model
def test_real_tokenizer_decodes_random_ids_like_the_library(smollm2_path):
    import random

    from transformers import AutoTokenizer

    from girih.serve.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_path)
    library = AutoTokenizer.from_pretrained(smollm2_path)
    draw = random.Random(3)
    for skip in (True, False):
        for _ in range(150):
            ids = [draw.randrange(tokenizer.vocab_size) for _ in range(24)]
            text = "".join(pieces_of(tokenizer, ids, skip))
            assert library.decode(ids, skip_special_tokens=skip) in (text, text + "\ufffd")
    for text in SAMPLES:
        assert tokenizer.encode(text) == library.encode(text)
    messages = [{"role": "user", "content": "Hi 😀"}]
    ours = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    theirs = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours == theirs
