"""Text and regular expressions as Lark writes them."""

from __future__ import annotations

import json
import re

# Comments, texts and regular expressions, in which `<name>` is no control token, or one.
CONTROL = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)""")


def control_tokens(grammar: str) -> list[str]:
    """The control tokens that a grammar names: `<name>`, or `<[7,10-12]>` by their ids."""
    return [match[1] for match in CONTROL.finditer(grammar) if match[1]]


def lark_escaped(text: str) -> str:
    """Text for use inside a Lark regular expression."""
    return re.sub(r"([^\w\s<>=\"'`@#%&,:;!~\x7f-\U0010ffff-])", r"\\\1", text).replace("\n", "\\n")


def quoted(text: str) -> str:
    """Fixed text in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def unslashed(pattern: str) -> str:
    """A regular expression for use between the slashes of Lark."""
    return re.sub(r"(?<!\\)/", r"\\/", pattern)
