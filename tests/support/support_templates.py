"""Random chat templates, and conversations to show with them: strategies of hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

WORDS = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "a",
        "Hello",
        " x ",
        "<|im_end|>",
        "it's",
        '"q"',
        "é",
        "😀",
        "<b>&",
        "a\nb\n",
        "{",
        "0",
    ]
)
NUMBERS = st.integers(-3, 5).map(str)
NAMES = ("message", "messages", "tools", "bos_token", "eos_token", "add_generation_prompt",
         "missing", "loop", "ns", "item", "caller")  # fmt: skip
FIELDS = ("role", "content", "tool_calls", "name", "missing", "function", "arguments", "first",
          "last",  "index0", "length", "x", "_x", "__class__")  # fmt: skip
TESTS = ("defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence",
         "true", "false", "boolean", "integer", "float", "odd", "even", "upper", "lower",
         "callable", "sameas none", "eq 1", "in ['a', 1]", "divisibleby 2", "filter", "test",
         "escaped")  # fmt: skip
# A filter, with the arguments that it is called with.
FILTERS = {
    "abs": [""],
    "attr": ["('role')", "('__class__')", "('missing')"],
    "batch": ["(2) | list", "(2, 'x') | list"],
    "capitalize": [""],
    "center": ["(9)"],
    "count": [""],
    "d": ["('none')"],
    "default": ["", "('none')", "('none', true)"],
    "dictsort": ["", "(by='value')", "(reverse=true)"],
    "e": [""],
    "escape": [""],
    "filesizeformat": ["", "(true)"],
    "first": [""],
    "float": ["", "(1.5)"],
    "forceescape": [""],
    "format": ["(1)", "('a', 'b')", "(x=1)"],
    "groupby": ["('role') | list", "('content', default='') | map(attribute=0) | list"],
    "indent": ["", "(2)", "(2, true)", "('> ', blank=true)"],
    "int": ["", "(7)", "(0, 16)"],
    "items": [" | list"],
    "join": ["", "(', ')", "(', ', attribute='content')"],
    "last": [""],
    "length": [""],
    "list": [""],
    "lower": [""],
    "map": ["('upper') | list", "(attribute='content') | list", "('default', 1) | list",
            "('tojson') | list"],
    "max": ["", "(attribute='content')"],
    "min": ["", "(attribute='content')"],
    "pprint": [""],
    "reject": [" | list", "('none') | list"],
    "rejectattr": ["('role') | list", "('role', 'equalto', 'user') | list"],
    "replace": ["('a', 'b')", "('a', '', 1)"],
    "reverse": [" | list"],
    "round": ["", "(1, 'floor')"],
    "safe": [""],
    "select": [" | list", "('string') | list"],
    "selectattr": ["('content') | list", "('role', 'in', ['user', 'tool']) | list"],
    "slice": ["(2) | list"],
    "sort": ["", "(reverse=true)", "(attribute='role')", "(case_sensitive=true)"],
    "string": [""],
    "striptags": [""],
    "sum": ["", "(attribute='x')", "(start=1)"],
    "title": [""],
    "tojson": ["", "(indent=2)", "(2)", "(true)", "(ensure_ascii=true)", "(sort_keys=true)",
               "(separators=(',', ':'))", "(false, 1, (';', '='), true)", "(indent='  ')",
               "(default=1)"],
    "trim": ["", "('a')"],
    "truncate": ["(3)", "(4, true, '..', 0)"],
    "unique": [" | list", "(attribute='role') | list"],
    "upper": [""],
    "urlencode": [""],
    "urlize": [""],
    "wordcount": [""],
    "wordwrap": ["(4)", "(4, false)"],
    "xmlattr": ["", "(false)"],
}  # fmt: skip
METHODS = (".strip()", ".rstrip('\\n')", ".split('a')", ".split()", ".upper()", ".startswith('a')",
           ".endswith(('a', '\\n'))", ".replace('a', 'b')", ".format(1, x=2)", ".items() | list",
           ".keys() | list", ".get('role', 'none')", ".append(1)", ".update({})", ".pop()",
           ".format_map({'x': 1})", ".count('a')", ".find('l')", ".removeprefix('H')",
           ".__class__", ".mro()")  # fmt: skip
CALLS = ("range(3) | list", "range(1, 9, 3) | list", "range(200000)", "dict(a=1, self=2)",
         "dict([('a', 1)], b=2)", "dict.fromkeys('ab', 0)", "dict.__class__", "dict.mro()",
         "namespace(x=1).x", "namespace({'x': 2}, self=3).self", "namespace(_x=1)",
         "namespace(x=1)['x']", "namespace(x=1).__init__", "joiner(', ')()",
         "cycler('a', 'b').next()", "strftime_now('%Y-%m')", "raise_exception('refused')",
         "raise_exception()", "f('a')", "f(x='b')", "f()")  # fmt: skip
OPERATORS = ("+", "-", "*", "~", "/", "//", "%", "==", "!=", "<", ">=", "in", "not in", "and", "or")


def quoted(text: str) -> str:
    """A string literal of Jinja."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


ATOMS = st.one_of(
    WORDS.map(quoted),
    NUMBERS,
    st.sampled_from(NAMES),
    st.sampled_from(["1.5", "true", "none", "[]", "{}", "['b', 'A', 'a']", "{'b': 1, 'a': 'é'}"]),
    st.sampled_from(["message.role", "message.content", "message['content']", "loop.index"]),
    st.sampled_from(["messages[0].role", "messages[-1]['content']", "messages | length"]),
)
SHAPES = {
    "operator": st.sampled_from([f"(VALUE {word} OTHER)" for word in OPERATORS]),
    "filter": st.sampled_from([f"(VALUE | {f}{how})" for f in FILTERS for how in FILTERS[f]]),
    "method": st.sampled_from([f"(VALUE){method}" for method in METHODS]),
    "call": st.sampled_from(CALLS),
    "choice": st.just("(VALUE if OTHER else OTHER)"),
    "test": st.sampled_from([f"(VALUE {word} {t})" for t in TESTS for word in ("is", "is not")]),
    "index": st.sampled_from(
        [f"(VALUE)[{index}]" for index in ("0", "-1", "1:", "::-1", ":2", "'role'", "'x'")]
    ),
    "field": st.sampled_from([f"(VALUE).{field}" for field in FIELDS]),
    "list": st.just("[VALUE, OTHER]"),
}


@st.composite
def expressions(draw: Any, depth: int) -> str:
    """An expression; many fail when they are evaluated."""
    if depth == 0:
        return draw(ATOMS)
    kind = draw(st.sampled_from(["operator", "filter", "filter", *SHAPES]))
    other, value = draw(ATOMS), draw(expressions(depth - 1))
    return draw(SHAPES[kind]).replace("OTHER", other).replace("VALUE", value)


@st.composite
def _tag(draw: Any, words: str) -> str:
    start = draw(st.sampled_from(["{%", "{%", "{%-", "{%+"]))
    end = draw(st.sampled_from(["%}", "%}", "-%}", "+%}"]))
    return f"{start} {words} {end}"


@st.composite
def blocks(draw: Any, depth: int = 2) -> str:
    """A piece of a template."""
    kinds = "tteeeescr" if depth == 0 else "tteeeescrfffiigmbnl"
    kind = draw(st.sampled_from(kinds))
    if kind == "t":
        return draw(
            st.sampled_from(["", " ", "\n", "  \n", "\n\n", "  x\n", "<|im_start|>", "{ }", "\t"])
        )
    if kind == "e":
        start, end = draw(
            st.sampled_from([("{{", "}}"), ("{{-", "}}"), ("{{", "-}}"), ("{{-", "-}}")])
        )
        return f"{start} {draw(expressions(draw(st.integers(0, 2))))} {end}"
    if kind == "s":
        target = draw(st.sampled_from(["item", "ns", "ns.x", "ns._x", "message", "item, ns"]))
        return draw(_tag(f"set {target} = {draw(expressions(1))}"))
    if kind == "c":
        return draw(st.sampled_from(["{# note #}", "{#- note -#}", " {# note #}\n"]))
    if kind == "r":
        return draw(st.sampled_from(["{% raw %}{{ x }}{% endraw %}", "{{ ns.x }}"]))
    inner = "".join(draw(st.lists(blocks(depth - 1), min_size=1, max_size=3)))
    return draw(_wrapped(kind, inner))


@st.composite
def _wrapped(draw: Any, kind: str, inner: str) -> str:
    value = draw(expressions(1))
    openings = {
        "f": ("for message in messages", "endfor"),
        "i": (f"if {value}", "endif"),
        "g": ("generation", "endgeneration"),
        "m": ("macro f(x='d')", "endmacro"),
        "b": ("set item", "endset"),
        "n": ("filter upper", "endfilter"),
        "l": ("call f('a')", "endcall"),
    }
    start, end = openings[kind]
    if kind == "f":
        extra = draw(st.sampled_from(["", f" if {value}", f" in {value}", " recursive"]))
        start = "for item" + extra if extra.startswith(" in") else start + extra
        leave = draw(st.sampled_from(["break", "continue", None]))
        if leave is not None:
            inner += (
                draw(_tag(f"if {draw(expressions(1))}")) + draw(_tag(leave)) + "{% endif %}" + "y"
            )
    middle = ""
    if kind == "i" and draw(st.booleans()):
        middle = draw(_tag("else")) + draw(blocks(0))
    return draw(_tag(start)) + inner + middle + draw(_tag(end))


@st.composite
def templates(draw: Any) -> str:
    """A whole template; it may refuse, or not even compile."""
    opening = (
        "{% set ns = namespace(x=0) %}{% set message, item = messages[0], messages %}"
        "{% macro f(x='d') %}<{{ x }}{{ caller() if caller is defined }}>{% endmacro %}"
    )
    return opening + "".join(draw(st.lists(blocks(), min_size=1, max_size=3)))
