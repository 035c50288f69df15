"""`girih explain`: print the stages of a model's compilation."""

from __future__ import annotations

from girih.conf.compose import compose_config, to_engine_config
from girih.serve.commands import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print the program map, the pass table and the key; ends with `pieces=N tiles=K`."""
    config = to_engine_config(compose_config("explain", words))
    from girih.runtime import launch

    with ProgressDisplay(options.quiet) as progress:
        text = launch.explain(config, progress)
    print(text)
    return 0
