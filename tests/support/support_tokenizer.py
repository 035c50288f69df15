"""Two small tokenizers trained on the spot: byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import codecs
import functools
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from girih.serve.text.chat_template import ChatTemplate
from girih.serve.text.tokenizer import Tokenizer as GirihTokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "def add(a, b):\n    return a + b\n",
    "你好，世界！今天天气很好。",
    "A smile 😀, a flag 🇮🇳, a family 👨‍👩‍👧 and café naïve.",
    "one two three four five six seven eight nine ten",
] * 4
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _trained_byte_level() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False)])
    return backend.to_str()


@functools.cache
def _trained_byte_fallback() -> str:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL + bytes_, show_progress=False
    )
    backend.train_from_iterator([TEXT[0], TEXT[1], TEXT[4]] * 3, trainer)
    # Byte tokens are ordinary tokens; only the control tokens are special.
    loaded = Tokenizer.from_str(backend.to_str().replace('"special":true', '"special":false'))
    loaded.add_special_tokens(SPECIAL)
    return loaded.to_str()


def byte_level() -> GirihTokenizer:
    """A byte-level tokenizer with a chat template."""
    backend = Tokenizer.from_str(_trained_byte_level())
    return GirihTokenizer(backend, {"default": ChatTemplate(CHAT)}, {"eos_token": "<|im_end|>"})


def byte_fallback() -> GirihTokenizer:
    """A word-mark tokenizer that writes unknown characters as byte tokens; no chat template."""
    return GirihTokenizer(Tokenizer.from_str(_trained_byte_fallback()))


def whole_text(tokenizer, ids, skip):
    """All ids decoded at once, without those that begin a character and do not end it."""
    kept = [i for i in ids if not (skip and tokenizer.is_special(i))]
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if tokenizer.is_byte_level:
        return utf8.decode(b"".join(map(tokenizer.token_bytes, kept)))
    for i in kept:
        utf8.decode(tokenizer.token_bytes(i), final=not tokenizer.is_byte_token(i))
    return tokenizer.decode(kept[: len(kept) - len(utf8.getstate()[0])], skip)


def write_files(folder: Path) -> None:
    """Write a byte-level tokenizer with a chat template, as a model's directory has them."""
    (folder / "tokenizer.json").write_text(_trained_byte_level())
    (folder / "chat_template.jinja").write_text(CHAT)
