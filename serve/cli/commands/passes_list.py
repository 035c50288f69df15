"""`girih passes list`: the passes in order, and which levels run them."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.conf.files import group_options, load_opt_level
from girih.kernels.base.records import to_record
from girih.passes.options import OptConfig
from girih.passes.pipeline import FACTS
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print one line per pass."""
    opt = to_record(OptConfig, compose_config("passes list", words)["opt"])
    levels = {name: load_opt_level(name).runs() for name in group_options("opt")}
    running = opt.runs()
    print(f"{'pass':24s} {'phase':13s} {'levels':12s} {opt.level:4s} effect")
    for item in FACTS:
        at = " ".join(name for name, names in levels.items() if item.name in names)
        state = "on" if item.name in running else "off"
        print(f"{item.name:24s} {item.phase.value:13s} {at:12s} {state:4s} {item.summary}")
    return 0
