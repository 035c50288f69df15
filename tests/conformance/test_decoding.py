"""Our streamed text of random ids against what transformers' tokenizer decodes at once."""

from __future__ import annotations

import functools

import pytest
import support_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support_conformance import cases
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from girih.serve.text.detokenizer import Detokenizer
from girih.serve.text.tokenizer import Tokenizer as GirihTokenizer

WORDS = [*support_tokenizer.TEXT, "don't stop, it's he'll . we 've n't ! a , b", "un##break able"]
MARK = "\u2581"


def _trained(model, trainer, pre_tokenizer, decoder):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.train_from_iterator(WORDS, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("</x>", special=True)])
    return backend


def word_pieces():
    """BERT's."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]")
    splitter = pre_tokenizers.BertPreTokenizer()
    return _trained(model, trainer, splitter, decoders.WordPiece(prefix="##", cleanup=True))


def unigram():
    """T5's and XLM's: a mark before each word."""
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    mark = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    return _trained(models.Unigram(), trainer, mark, decoders.Metaspace(MARK, "always"))


def metaspace_first():
    """Later Llama 2 conversions: a mark before the first word only."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    mark = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="first", split=False)
    return _trained(models.BPE(), trainer, mark, decoders.Metaspace(MARK, "first", split=False))


def no_decoder():
    """Words as they are, with a space between."""
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    model = models.WordLevel(unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(WORDS, trainer)
    return backend


BACKENDS = {
    "byte level": lambda: Tokenizer.from_str(support_tokenizer._trained_byte_level()),
    "byte fallback": lambda: Tokenizer.from_str(support_tokenizer._trained_byte_fallback()),
    "word pieces": word_pieces,
    "unigram": unigram,
    "metaspace first": metaspace_first,
    "no decoder": no_decoder,
}


@functools.cache
def both(name):
    backend = BACKENDS[name]()
    library = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend.to_str()))
    return GirihTokenizer(backend), library


def streamed(tokenizer, pieces, skip, context=()):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, context=context)
    return "".join([detokenizer.push(piece).text for piece in pieces] + [detokenizer.finish().text])


@st.composite
def outputs(draw, size):
    """Ids, in the pieces in which they come."""
    token = st.integers(0, size - 1)
    common = st.integers(0, min(size, 40) - 1)  # control tokens and bytes come first
    return draw(st.lists(st.lists(st.one_of(token, common), min_size=1, max_size=4), max_size=12))


@pytest.mark.parametrize("name", BACKENDS)
@cases(150)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_text_of_all_ids(name, data, skip):
    tokenizer, library = both(name)
    pieces = data.draw(outputs(tokenizer.vocab_size))
    ids = [token_id for piece in pieces for token_id in piece]
    theirs = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == theirs
    text = streamed(tokenizer, pieces, skip)
    assert text == support_tokenizer.whole_text(tokenizer, ids, skip)
    assert text == theirs or theirs.endswith("\ufffd")


@pytest.mark.parametrize("name", BACKENDS)
@cases(80)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_texts_have_the_same_ids(name, text):
    tokenizer, library = both(name)
    assert tokenizer.encode(text) == library.encode(text)
    ids = library.encode(text)
    assert streamed(tokenizer, [[i] for i in ids], True) == library.decode(
        ids, skip_special_tokens=True
    )
