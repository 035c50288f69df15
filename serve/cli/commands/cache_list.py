"""`girih cache list`: the cached bundles, the one used last first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from girih.conf.compose import compose_config
from girih.serve.cli.verbs import Options

if TYPE_CHECKING:
    from girih.graph.bundle.cache import CachedBundle


def run(words: list[str], options: Options) -> int:
    """Print one line per bundle, then the total."""
    compose_config("cache list", words)
    from girih.graph.bundle.cache import list_bundles
    from girih.passes.build.key import bundle_dir

    bundles = list_bundles(bundle_dir(), prepared=True)
    print(
        f"{'key':20s} {'model':24s} {'dtype':9s} {'isa':12s} {'MiB':>7s} {'built':>8s} {'used':>8s}"
    )
    for b in bundles:
        print(
            f"{b.key.digest:20s} {b.model[:24]:24s} {b.entry('model.dtype'):9s} "
            f"{_machine(b):12s} {b.num_bytes / 2**20:7.1f} {age(b.built):>8s} "
            f"{age(b.used):>8s}"
        )
    total = sum(b.num_bytes for b in bundles) / 2**20
    count = "1 bundle" if len(bundles) == 1 else f"{len(bundles)} bundles"
    print(f"{count}, {total:.1f} MiB in {bundle_dir()}")
    return 0


def _machine(bundle: CachedBundle) -> str:
    """The instruction set of a bundle, or whose machine it was prepared for."""
    if bundle.is_prepared:
        return f"for {bundle.entry('target.arch') or bundle.entry('target.device')}"
    return bundle.entry("target.isa")


def age(moment: float) -> str:
    """Return the age of a moment in its largest unit, e.g. "3 h"."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
