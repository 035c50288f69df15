"""The model's tokenizer: text to ids and back, straight on the `tokenizers` library.

`tokenizer.json` is read directly (0.3 s); `transformers`, which imports torch, is only asked when
a model ships without one. Chat templates are in `chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from girih.kernels.base.errors import RequestError, SourceError
from girih.runtime.structured.token_bytes import TokenBytes
from girih.serve.text import generic_tools
from girih.serve.text.chat_template import ChatTemplate, load_chat_templates, pick_template


class Tokenizer:
    """Encodes prompts, decodes outputs, renders chats.

    Args:
        backend: the tokenizer proper.
        chat_templates: the model's templates by name.
        special_tokens: named tokens such as {"bos_token": "<s>"}, shown to the template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_templates: dict[str, ChatTemplate] | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.chat_templates = chat_templates or {}
        self.special_tokens = special_tokens or {}
        self._token_bytes = TokenBytes(backend)
        self.is_byte_level = self._token_bytes.is_byte_level
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes.of)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows (a model's own vocabulary may be padded beyond)."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}", param="prompt") from error

    def encode_framed(
        self,
        text: str,
        second: str | None = None,
        limit: int | None = None,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a text or a pair, and which text each token is of (0 or 1).

        Args:
            text: the first text.
            second: the second one of a pair.
            limit: most tokens, the marks around the texts included; the longer text is cut at its
                end first.
            add_special_tokens: put these marks.

        Raises:
            RequestError: a text is not valid Unicode, or the limit leaves no room beside the marks.
        """
        try:
            if limit is None:
                framed = self._backend.encode(text, second, add_special_tokens=add_special_tokens)
            else:
                framed = self._shortened(text, second, limit, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode: {error}", param="input") from error
        return list(framed.ids), list(framed.type_ids)

    def _shortened(
        self, text: str, second: str | None, limit: int, add_special_tokens: bool
    ) -> tokenizers.Encoding:
        backend = self._backend
        marks = backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        room = limit - marks
        if room < 1:
            raise RequestError(
                f"truncate_prompt_tokens is {limit}, which leaves no room beside the {marks} marks "
                "that the model expects around a text",
                param="truncate_prompt_tokens",
            )
        first = backend.encode(text, add_special_tokens=False)
        other = None if second is None else backend.encode(second, add_special_tokens=False)
        if other is None:
            first.truncate(room)
        else:
            first.truncate(max(room - len(other), (room + 1) // 2))
            other.truncate(max(0, room - len(first)))
        return backend.post_process(first, other, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids the tokenizer does not know are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return one token as text; half a character shows as a replacement character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling, or None."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token, left out of text by default."""
        return token_id in self._token_bytes.special_ids

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token stands for one byte of a character the vocabulary lacks."""
        return token_id in self._token_bytes.byte_ids

    def render_chat(
        self, messages: list[dict[str, Any]], *, chat_template: str | None = None, **options: Any
    ) -> str:
        """Render messages with a template of the model (see `ChatTemplate.render`).

        Args:
            messages: the conversation.
            chat_template: name of one of the model's templates, or the text of another one.
            options: for `ChatTemplate.render`.

        Raises:
            RequestError: the model has no such template, or the template refuses the messages.
        """
        template = pick_template(self.chat_templates, chat_template, bool(options.get("tools")))
        render = ChatTemplate.render if "tools" in template.source else generic_tools.render
        return render(template, messages, self.special_tokens, **options)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a model directory.

    Raises:
        SourceError: there is none, or it cannot be read.
    """
    config = _read_json(path / "tokenizer_config.json")
    return Tokenizer(
        _load_backend(path), load_chat_templates(path, config), _special_tokens(path, config)
    )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise SourceError(f"{file} could not be read: {error}") from error
    from transformers import AutoTokenizer

    try:
        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        ).backend_tokenizer
    except Exception as error:
        raise SourceError(
            f"{path} holds no tokenizer.json, and transformers could not convert another one: "
            f"{error}"
        ) from error
    return backend


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    named = {**_read_json(path / "special_tokens_map.json"), **config}
    found: dict[str, str] = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
