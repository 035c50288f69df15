"""Vocabularies and the store of grammars that these tests share."""

from __future__ import annotations

import pytest
from support_grammars import EOS, VOCAB
from support_tokenizer import _trained_byte_fallback, _trained_byte_level

from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary

TOKENIZERS = {"byte level": _trained_byte_level, "byte fallback": _trained_byte_fallback}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    (path / "tokenizer.json").write_text(_trained_byte_level())
    return read_vocabulary(path, VOCAB, (EOS,))


@pytest.fixture
def store(vocabulary):
    return GrammarStore(lambda: vocabulary, max_grammars=4)


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_vocabulary(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    (path / "tokenizer.json").write_text(TOKENIZERS[request.param]())
    return read_vocabulary(path, VOCAB, (EOS,))
