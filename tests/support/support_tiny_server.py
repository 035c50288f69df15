"""`girih serve` in a process of its own, over a tiny random Llama without compilation."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import support_tokenizer
from support_models import tiny_model

CHAT_TEMPLATE = support_tokenizer.CHAT


def tiny_chat_model(folder: Path) -> Path:
    """A tiny model with a chat template, in `folder`."""
    path = folder / "tiny"
    shutil.copytree(tiny_model("llama"), path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return path


@contextlib.contextmanager
def running_tiny_server(*words: str) -> Iterator[str]:
    """Start the server with further `key=value` words; yields its URL, ends it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_chat_model(Path(folder))
        command = [
            sys.executable,
            "-m",
            "girih.serve.cli.main",
            "serve",
            f"model={model}",
            "opt=O0",
        ]
        settings = ["port=0", "threads=1", "num_blocks=256", "serve.log_requests=false"]
        log = Path(folder) / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [*command, *settings, *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "GIRIH_CACHE_DIR": folder},
            ) as process,
        ):
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert " is ready at " in line, line + log.read_text()
                yield line.split(" is ready at ")[1].split()[0]
            finally:
                process.terminate()
                process.wait(30)
        assert "Traceback" not in log.read_text(), log.read_text()
