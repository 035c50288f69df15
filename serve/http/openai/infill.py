"""Fill-in-the-middle prompts: text before and after a gap, in the order a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass

from girih.kernels.base.errors import RequestError
from girih.serve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillTokens:
    """Three marks and their order.

    Attributes:
        before: stands before the text that precedes the gap.
        after: stands before the text that follows the gap.
        end: closes the prompt; None where the first text comes last and closes it.
        suffix_first: whether the text that follows the gap is given first.
    """

    before: str
    after: str
    end: str | None
    suffix_first: bool = False


FAMILIES = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillTokens("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


def infill_prompt(prompt: str, suffix: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that ask for the text between `prompt` and `suffix`.

    Raises:
        RequestError: the tokenizer has no tokens for this.
    """
    family = find_infill_tokens(tokenizer)
    if family is None:
        raise RequestError(
            "suffix is set, but this model's tokenizer has no fill-in-the-middle tokens; leave "
            "it out",
            param="suffix",
        )
    before = [*_id(tokenizer, family.before), *tokenizer.encode(prompt, False)]
    after = [*_id(tokenizer, family.after), *tokenizer.encode(suffix, False)]
    middle = after + before if family.suffix_first else before + after
    return [*_opening(tokenizer), *middle, *_id(tokenizer, family.end)]


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Return the marks this tokenizer knows, or None."""
    for family in FAMILIES:
        marks = (family.before, family.after, family.end)
        if all(mark is None or tokenizer.token_id(mark) is not None for mark in marks):
            return family
    return None


def _id(tokenizer: Tokenizer, mark: str | None) -> list[int]:
    found = None if mark is None else tokenizer.token_id(mark)
    return [] if found is None else [found]


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The begin-of-sequence token, where the tokenizer puts one before a text."""
    begin = tokenizer.token_id(tokenizer.special_tokens.get("bos_token", ""))
    return [begin] if begin is not None and tokenizer.encode("")[:1] == [begin] else []
