"""`girih generate`: complete prompts; stdout carries the text and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError, RequestError
from girih.kernels.base.records import to_record
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.config import SamplingConfig
from girih.serve.progress import ProgressDisplay
from girih.serve.text.prompts import Prompt
from girih.serve.text.sampling_defaults import SamplingDefaults, read_generation_config

End = tuple[str | None, int]
"""Why a text ended, and after how many tokens."""


def run(words: list[str], options: Options) -> int:
    """Build the engine, then stream one text, or print several."""
    config = compose_config("generate", words)
    texts = _texts(config)
    engine_config = engine_of(config, generates=True)
    sampling = to_record(SamplingConfig, config["sampling"])
    _require_sampling(sampling)
    from girih.serve.offline.llm import LLM

    with ProgressDisplay(options.quiet) as progress:
        llm = LLM.from_config(engine_config, progress)
    model_values = read_generation_config(Path(llm.facts.model_path))
    params = SamplingDefaults(model_values, sampling).build({}, max_tokens=128)
    prompts = [_prompt(llm, text, config["chat"]) for text in texts]
    if len(prompts) == 1:
        ends = [_stream(llm, prompts[0], params)]
    else:
        ends = []
        for output in llm.generate(prompts, params, use_progress=not options.quiet):
            (end,) = output.outputs
            print(end.text, flush=True)
            ends.append((end.finish_reason, len(end.token_ids)))
    if not options.quiet:
        _tell_of_limits(ends, params.max_tokens, llm.facts.max_model_len)
    return 0


def _texts(config: dict[str, Any]) -> list[str]:
    single = [config["prompt"]] if config["prompt"] is not None else []
    texts = [sys.stdin.read() if text == "-" else text for text in [*single, *config["prompts"]]]
    if not texts:
        raise ConfigError('there is nothing to complete; give prompt="…", or prompt=- for stdin')
    if "" in texts:
        raise ConfigError("a prompt is empty; give at least one character")
    return texts


def _require_sampling(sampling: SamplingConfig) -> None:
    """Tell of a wrong value before the long work."""
    try:
        SamplingDefaults(server=sampling).build({}, None)
    except RequestError as error:
        raise ConfigError(f"sampling: {error}") from error


def _prompt(llm: Any, text: str, chat: bool) -> Prompt:
    if not chat:
        return text
    ids: list[int] = llm.render_chat([{"role": "user", "content": text}])
    return ids


def _stream(llm: Any, prompt: Prompt, params: SamplingParams) -> End:
    reason, count = None, 0
    for delta in llm.stream(prompt, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        reason, count = delta.finish_reason, count + len(delta.token_ids)
    sys.stdout.write("\n")
    sys.stdout.flush()
    return reason, count


def _tell_of_limits(ends: list[End], max_tokens: int | None, max_model_len: int) -> None:
    """Say on stderr how many texts did not end by themselves, and what raises the limit."""
    cut = [count for reason, count in ends if reason == "length"]
    at_limit = sum(count == max_tokens for count in cut)
    what = "the text" if len(ends) == 1 else "{} of " + str(len(ends)) + " texts"
    if at_limit:
        print(
            f"girih: {what.format(at_limit)} stopped at max_tokens={max_tokens}; give "
            "max_tokens=N for longer ones",
            file=sys.stderr,
        )
    if len(cut) > at_limit:
        print(
            f"girih: {what.format(len(cut) - at_limit)} filled the context of {max_model_len} "
            "tokens (max_model_len)",
            file=sys.stderr,
        )
