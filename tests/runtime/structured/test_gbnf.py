"""GBNF through both grammar libraries: the same texts, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest
from support_tokenizer import _trained_byte_level

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured import backends
from girih.runtime.structured.gbnf import GbnfError, gbnf_to_lark, is_gbnf
from girih.runtime.structured.vocabulary import read_vocabulary

VOCAB, EOS = 424, 2
BACKENDS = ("llguidance", "xgrammar")
SUM = 'root ::= sum\nsum ::= item | sum "+" item\nitem ::= [0-9]+ | "(" sum ")"'

# grammar, texts, other texts
GRAMMARS = [
    ('root ::= word "x"\nword ::= [a-z]+', ["abx", "ax", "xx"], ["x", "ab"]),
    ('root ::= ([a-z] | "abc")+', ["abd", "abc", "ab"], ["a1"]),
    ('root ::= "if" | id\nid ::= [a-z]+', ["if", "ig", "iff"], ["1"]),
    ('root ::= ("a" root)? word "x"\nword ::= [a-z]+', ["abx", "aabxbx"], ["ab"]),
    (SUM, ["1+2+33", "(1+2)+3"], ["1+", "(1", "+1"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
    ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
    ('root ::= "a" .* "b"', ["a\nb", "axb"], ["a"]),
    (r'root ::= "\u0041\u00e9\U0001F600\x41\n\t\"\\"', ['Aé😀A\n\t"\\'], ["A"]),
    (r'root ::= "\[\]"', ["[]"], []),
    (r"root ::= [\]\[\\/\"\-a]+", ['][\\/"-a'], ["b"]),
    (r'root ::= [^"\\\x00-\x1f\x7f]+', ["abc é"], ['a"', "a\n", "\x7f"]),
    (r"root ::= [\u00e0-\u00ff]+", ["àé"], ["a"]),
    ("root ::= [a-z-]", ["-", "b"], ["B"]),
    ("root ::= [a-z-9]", ["-", "9", "b"], ["1"]),
    ("root ::= [-a]", ["-", "a"], ["b"]),
    ("root ::= [&&^~[]", ["&", "^", "~", "["], ["a"]),
    ("root ::= [^]", ["x", "\n"], ["", "xx"]),
    ('root ::= a{2,3} "b"{2} "c"{1,} "d"*\na ::= "x"', ["xxbbc", "xxxbbccd"], ["xbbc", "xxbc"]),
    ("root ::= start\nstart ::= item\nitem ::= [0-9]", ["1"], ["a"]),
    ('root ::= fooBar foo-bar foo_bar\nfooBar ::= "x"\nfoo-bar ::= "y"\nfoo_bar ::= "z"',
     ["xyz"], ["xx"]),
    ('root ::= "" | "a"', ["", "a"], ["b"]),
    ('root ::= "a" ( | "b") "c" |', ["ac", "abc", ""], ["a"]),
    ('root ::= "x" ws\nws ::=\n', ["x"], ["x "]),
    ('root ::= ("a"\n  | "b" # or\n)\n', ["a", "b"], ["c"]),
    ('# it ::= begins\nroot ::=\n  "a" |\n "b"', ["a", "b"], ["c"]),
    ('root ::= "a" # ::= "b"\n', ["a"], ["b"]),
    ('root ::= "<|im_end|>" "\x7f"', ["<|im_end|>\x7f"], ["<|im_end|>"]),
    ('unused ::= "b"\nroot ::= "a"', ["a"], ["b"]),
]  # fmt: skip
REFUSED = [
    ("root ::= []", "allows nothing"),
    (r'root ::= "a\q"', r"the escape \q is not known"),
    (r'root ::= "\x4"', r"the escape \x is not known"),
    (r'root ::= "\xzz"', r"\xzz is not a character"),
    (r'root ::= "\ud83d"', r"\ud83d is not a character"),
    ('x ::= "a"', "no rule 'root'"),
    ("root ::= y", "the rule 'y', which 'root' names, is not there"),
    ('root ::= "a"\nroot ::= "b"', "the rule 'root' is there twice, at line 2, column 1"),
    ('root ::= "a\n', "'\"a\\n' is not understood, at line 1, column 10"),
    ('"a"\nroot ::= "a"', "must begin with a rule, at line 1, column 1"),
    ('root ::= ( "a"', "'root' leaves a parenthesis open"),
    ('root ::= <think> "a"', "at line 1, column 10"),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    (path / "tokenizer.json").write_text(_trained_byte_level())
    return read_vocabulary(path, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def libraries(vocabulary):
    return {
        name: backends.load(name).make_backend(vocabulary, 1)
        for name in BACKENDS
        if backends.is_installed(name)
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_texts_of_a_grammar(libraries, vocabulary, grammar, good, bad, backend):
    pytest.importorskip(backend)
    tag = {"format": {"type": "grammar", "grammar": grammar}}
    forms = [
        StructuredOutput.grammar(grammar, backend=backend),
        StructuredOutput.structural_tag(tag, backend=backend),
    ]
    for form in forms:
        try:
            backends.check(form)
        except RequestError:
            assert backend == "xgrammar"  # it has no `.`, no empty alternatives, fewer escapes
            continue
        compiled = libraries[backend].compile(form)
        for text in (*good, *bad):
            matcher = compiled.matcher()
            ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
            assert all(map(matcher.accept, [*ids, EOS])) == (text in good), text


@pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_gbnf(grammar, message):
    with pytest.raises(RequestError) as caught:
        backends.check(StructuredOutput.grammar(grammar, backend="llguidance"))
    assert message in str(caught.value)
    with pytest.raises(GbnfError):
        gbnf_to_lark(grammar)
    tag = {"format": {"type": "grammar", "grammar": grammar}}
    with pytest.raises(RequestError, match="not valid GBNF"):
        backends.check(StructuredOutput.structural_tag(tag, backend="llguidance"))


def test_lark_is_told_from_gbnf():
    assert is_gbnf('# a comment\n root ::= "a"')
    assert is_gbnf('start ::= "a"\nroot ::= start')
    assert not is_gbnf('start: "x ::= y"')
    assert not is_gbnf('start: a\na: "b" // ::=')


def test_a_long_grammar_is_read_once():
    rules = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(5000))
    lark = gbnf_to_lark(f'root ::= r0\n{rules}\nr5000 ::= "b"')
    assert lark.count("\n") == 5003
    assert lark.startswith("start: R0\nR0: R1\n")
    assert "start: r0\n" in gbnf_to_lark('root ::= "a" root | "b"')


def test_tokens_of_several_characters_are_offered(libraries, vocabulary):
    form = StructuredOutput.grammar('root ::= " the" root | "."')
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    libraries["llguidance"].fill([libraries["llguidance"].compile(form).matcher()], [0], mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    words = {vocabulary.tokens[i] for i in np.flatnonzero(bits)}
    fitting = {word for word in vocabulary.tokens if word and b" the".startswith(word)}
    assert len(fitting) > 1
    assert words == {*fitting, b"."}
