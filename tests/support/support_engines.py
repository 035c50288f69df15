"""Engines over eager pieces; programs with one key are traced once per test process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from girih import LLM
from girih.kernels.base.target import require_runnable
from girih.passes.build.key import bundle_key
from girih.runtime.start.context import Start, start_of
from girih.runtime.start.launch import Engine, engine_of
from girih.runtime.start.runnable_program import RunnableProgram, obtain_program
from girih.serve.offline.options import engine_config
from girih.serve.text.tokenizer import load_tokenizer

_PROGRAMS: dict[str, RunnableProgram] = {}


def eager_start(path: Path | str, **options: Any) -> tuple[Start, RunnableProgram]:
    """A start at O0 and the program it runs."""
    start = start_of(engine_config(str(path), {"opt": "O0", **options}))
    require_runnable(start.target)
    key = bundle_key(start.spec, start.config.opt, start.target).digest
    if key not in _PROGRAMS:
        _PROGRAMS[key] = obtain_program(start)
    program = _PROGRAMS[key]
    return start, dataclasses.replace(program, tiles=dict(program.tiles))


def eager_engine(path: Path | str, **options: Any) -> Engine:
    """What `build_engine` returns at O0."""
    return engine_of(*eager_start(path, **options))


def eager_llm(path: Path | str, **options: Any) -> LLM:
    """What `LLM(path, opt="O0", ...)` makes."""
    engine = eager_engine(path, **options)
    return LLM.from_engine(engine, load_tokenizer(Path(engine.facts.model_path)))
