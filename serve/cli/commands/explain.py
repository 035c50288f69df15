"""`girih explain`: print the stages of a model's compilation."""

from __future__ import annotations

from pathlib import Path

from girih.conf.compose import compose_config
from girih.runtime.records.config import EngineConfig
from girih.serve.cli.preflight import engine_of, require_writable
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print the program map, the pass table and the key; ends with `pieces=N tiles=K`.

    With `explain.html=FILE` a page is written instead.
    """
    composed = compose_config("explain", words)
    config, html = engine_of(composed), composed["explain"]["html"]
    require_writable("explain.html", html)
    if html:
        return _write_page(config, Path(html).expanduser(), options)
    from girih.runtime.start import launch

    with ProgressDisplay(options.quiet) as progress:
        text = launch.explain(config, progress)
    print(text)
    return 0


def _write_page(config: EngineConfig, path: Path, options: Options) -> int:
    from girih.runtime.inspect import compiler_tools

    with ProgressDisplay(options.quiet) as progress:
        compiler_tools.write_page(config, path, progress)
    print(path)
    return 0
