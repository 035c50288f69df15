"""`girih compile`: compile a model into a bundle."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Compile, write the bundle, and print what was made."""
    config = engine_of(compose_config("compile", words), writes_bundle=True)
    from girih.runtime.start import launch

    with ProgressDisplay(options.quiet) as progress:
        result = launch.compile(config, progress)
    print(result)
    return 0
