"""`girih cache prune`: remove the bundles used longest ago."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.runtime.records.config import CompileConfig
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print what was removed, and what could not be."""
    wanted = compose_config("cache prune", words)["max_gib"]
    max_gib = CompileConfig().cache_gib if wanted is None else float(wanted)
    if max_gib < 0:
        raise ConfigError(f"max_gib is {max_gib}; it must be 0 (remove all) or more")
    from girih.graph.bundle.cache import is_in_use, list_bundles, prune
    from girih.passes.build.key import bundle_dir

    limit = int(max_gib * 2**30)
    removed = prune(bundle_dir(), limit)
    left = list_bundles(bundle_dir(), prepared=True)
    for bundle in removed:
        print(f"removed {bundle.path} ({bundle.model}, {bundle.num_bytes / 2**20:.1f} MiB)")
    if sum(b.num_bytes for b in left) > limit:
        for bundle in filter(is_in_use, left):
            print(f"kept {bundle.path} ({bundle.model}): an engine that runs uses it")
    freed = sum(b.num_bytes for b in removed) / 2**20
    print(f"{len(removed)} bundles removed, {freed:.1f} MiB freed, bound {max_gib:g} GiB")
    return 0
