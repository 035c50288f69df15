"""`girih passes diff`: what differs between two dumped graphs, or between two levels of a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from girih.conf.compose import compose_config
from girih.conf.files import load_opt_level
from girih.kernels.base.errors import ConfigError
from girih.serve.cli.preflight import engine_of, require_readable
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print the difference; exit code 0 when there is none, else 1 (as diff does)."""
    config = compose_config("passes diff", words)
    before, after = config["before"], config["after"]
    if not before or not after:
        raise ConfigError(
            "name both sides: before=FILE.json after=FILE.json, or before=O1 after=O2"
        )
    is_files = Path(before).suffix == ".json"
    engine = engine_of(config)
    if is_files:
        require_readable("before", before)
        require_readable("after", after)
    from girih.graph.partition.graph_file import read_graph
    from girih.passes.dump import text_diff
    from girih.runtime.inspect import compiler_tools

    if is_files:
        old, new = (compiler_tools.named_text(read_graph(Path(p))) for p in (before, after))
    else:
        levels = [dataclasses.replace(engine, opt=load_opt_level(n)) for n in (before, after)]
        with ProgressDisplay(options.quiet) as progress:
            old, new = compiler_tools.named_texts(levels, progress)
    difference = text_diff(old, new, before, after)
    print(difference, end="")
    return 1 if difference else 0
