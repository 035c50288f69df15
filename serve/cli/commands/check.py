"""`girih check`: compare the compiled program of a model with transformers on random weights."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print a table; 0 when the model is verified, else 1."""
    composed = compose_config("check", words)
    config, layers = engine_of(composed), composed["check"]["layers"]
    from girih.runtime.inspect.check_model import check_model

    with ProgressDisplay(options.quiet) as progress:
        report = check_model(config, layers, progress)
    print(report.text)
    return 0 if report.result.passed else 1
