"""`girih cache explain`: whether a model's bundle is cached, and if not, what made the miss."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.cli.commands.cache_list import age
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Print the verdict and, on a miss, every entry in which the nearest bundle differs."""
    config = engine_of(compose_config("cache explain", words))
    from girih.graph.bundle.cache import nearest_bundle
    from girih.passes.build.key import bundle_dir
    from girih.runtime.start.wanted import key_of

    with ProgressDisplay(options.quiet) as progress:
        key = key_of(config, progress)
    nearest = nearest_bundle(bundle_dir(), key)
    if nearest is None:
        print(f"miss: no bundle is cached in {bundle_dir()}")
        return 0
    differences = nearest.key.differences(key)
    if not differences:
        used = age(nearest.used)
        print(f"hit: {nearest.path}, built for {nearest.model}, used {used} ago")
        return 0
    print(
        f"miss: the nearest bundle, {nearest.key.digest} of {nearest.model}, differs in "
        f"{len(differences)} of {len(key.entries)} entries (bundle → wanted):"
    )
    for line in differences:
        print(f"  {line}")
    return 0
