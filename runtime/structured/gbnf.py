"""GBNF, the grammars of llama.cpp, as Lark for llguidance.

Lark splits text into words, each as long as can be, before it looks at rules; GBNF has no words. A
grammar without recursion becomes a single word, then, and one with recursion words of a character.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Sequence

from girih.runtime.structured.lark import quoted

TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[\w-]+)\s*::=
    |(?P<name>[\w-]+)
    |"(?P<text>(?:\\.|[^"\\\n])*)"
    |\[(?P<set>(?:\\.|[^\]\\\n])*)\]
    |(?P<times>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:x(..)|u(.{4})|U(.{8})|(.))|(.)", re.DOTALL)
CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
ANY = r"/(.|\n)/"
Token = tuple[str, str]


class GbnfError(ValueError):
    """Text that is no GBNF; says why."""


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF, and not Lark."""
    return re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is not None


def as_lark(text: str) -> str:
    """A grammar in Lark, whichever of the two it is in.

    Raises:
        GbnfError: it is no valid GBNF.
    """
    return gbnf_to_lark(text) if is_gbnf(text) else text


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark.

    Raises:
        GbnfError: it is not valid.
    """
    rules = _rules(text)
    used = _used(rules)
    is_word = not _is_recursive(rules, used)
    labels = {name: f"{'R' if is_word else 'r'}{index}" for index, name in enumerate(used)}
    lines = [f"{labels[name]}: {_expression(rules[name], labels, is_word)}" for name in used]
    return "\n".join([f"start: {labels['root']}", *lines]) + "\n"


def _rules(text: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    for kind, value, start in _tokens(text):
        if kind == "rule":
            if value in rules:
                raise GbnfError(f"the rule {value!r} is there twice, {_place(text, start)}")
            rules[value] = rule = []
        elif not rules:
            raise GbnfError(f"it must begin with a rule, {_place(text, start)}")
        else:
            rule.append((kind, value))
    for name, rule in rules.items():
        if rule.count(("mark", "(")) != rule.count(("mark", ")")):
            raise GbnfError(f"the rule {name!r} leaves a parenthesis open or unopened")
    if "root" not in rules:
        raise GbnfError("it has no rule 'root'")
    return rules


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Each token and where it begins."""
    start = 0
    while start < len(text):
        match = TOKEN.match(text, start)
        if match is None:
            found = text[start : start + 20]
            raise GbnfError(f"{found!r} is not understood, {_place(text, start)}")
        kind = str(match.lastgroup)
        if kind != "space":
            yield kind, match[kind], start
        start = match.end()


def _place(text: str, start: int) -> str:
    line_start = text.rfind("\n", 0, start)
    return f"at line {text.count(chr(10), 0, start) + 1}, column {start - line_start}"


def _named(rule: Sequence[Token]) -> list[str]:
    return [value for kind, value in rule if kind == "name"]


def _used(rules: dict[str, list[Token]]) -> list[str]:
    """The rules that the root needs."""
    for name, rule in rules.items():
        for other in _named(rule):
            if other not in rules:
                raise GbnfError(f"the rule {other!r}, which {name!r} names, is not there")
    found, todo = {"root": None}, ["root"]
    while todo:
        new = [name for name in _named(rules[todo.pop()]) if name not in found]
        todo += new
        found |= dict.fromkeys(new)
    return list(found)


def _is_recursive(rules: dict[str, list[Token]], used: Sequence[str]) -> bool:
    try:
        graphlib.TopologicalSorter({name: _named(rules[name]) for name in used}).prepare()
    except graphlib.CycleError:
        return True
    return False


def _expression(tokens: Sequence[Token], labels: dict[str, str], is_word: bool) -> str:
    parts: list[str] = []
    may_begin = True  # where an alternative may begin, and is empty if it ends at once
    for kind, value in tokens:
        if may_begin and (kind, value) in (("mark", "|"), ("mark", ")")):
            parts.append('""')
        may_begin = (kind, value) in (("mark", "|"), ("mark", "("))
        parts.append(_part(kind, value, labels, is_word))
    return " ".join([*parts, '""'] if may_begin else parts)


def _part(kind: str, value: str, labels: dict[str, str], is_word: bool) -> str:
    if kind == "name":
        return labels[value]
    if kind == "text":
        text = "".join(map(_character, ESCAPE.finditer(value)))
        return quoted(text) if is_word else f"({' '.join(map(quoted, text)) or quoted('')})"
    if kind == "set":
        return _set(value)
    return ANY if value == "." else "".join(value.split())


def _set(value: str) -> str:
    """A character set as a regular expression; every character is written by its number."""
    is_negated = value.startswith("^")
    written = value[int(is_negated) :]
    if not written:
        if is_negated:
            return ANY
        raise GbnfError("[] allows nothing")
    characters = [(_character(m), m[0] == "-") for m in ESCAPE.finditer(written)]
    found, index = "", 0
    while index < len(characters):
        is_range = index + 2 < len(characters) and characters[index + 1][1]
        ends = characters[index : index + 3 : 2] if is_range else characters[index : index + 1]
        found += "-".join(rf"\x{{{ord(character):X}}}" for character, _ in ends)
        index += 3 if is_range else 1
    return f"/[{'^' if is_negated else ''}{found}]/"


def _character(match: re.Match[str]) -> str:
    """The character that a match of ESCAPE stands for."""
    code = match[1] or match[2] or match[3]
    if code is not None:
        number = int(code, 16) if re.fullmatch("[0-9a-fA-F]+", code) else -1
        if not 0 <= number < 0x110000 or 0xD800 <= number < 0xE000:
            raise GbnfError(f"{match[0]} is not a character")
        return chr(number)
    escaped = match[4]
    if escaped is None:
        return match[5]
    if escaped.isalnum() and escaped not in CONTROLS:
        raise GbnfError(f"the escape {match[0]} is not known")
    return CONTROLS.get(escaped, escaped)
