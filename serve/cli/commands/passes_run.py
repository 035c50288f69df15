"""`girih passes run`: lower a model, or a dumped graph again, and print what each pass did."""

from __future__ import annotations

from pathlib import Path

from girih.conf.compose import compose_config
from girih.serve.cli.preflight import engine_of, require_readable
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print the pass table, and the graph with `text=true`."""
    config = compose_config("passes run", words)
    engine = engine_of(config)
    require_readable("graph", config["graph"])
    graph = Path(config["graph"]) if config["graph"] else None
    from girih.runtime.inspect import compiler_tools

    with ProgressDisplay(options.quiet) as progress:
        lowered = compiler_tools.lower_source(engine, graph, progress)
    if config["text"]:
        print(lowered.as_text())
    print(lowered.report(), end="")
    return 0
