"""`girih fetch`: get a model's files into the local cache."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.graph.files.sources import resolve_source
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Resolve the model source and print where its files are."""
    config = compose_config("fetch", words)
    with ProgressDisplay(options.quiet) as progress:
        files = resolve_source(config["model"]["source"], progress)
    print(files.path)
    return 0
