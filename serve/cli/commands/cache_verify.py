"""`girih cache verify`: read every file of every cached bundle and compare its checksum."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print one line per bundle; exit code 1 when one is damaged."""
    compose_config("cache verify", words)
    from girih.graph.bundle.cache import verify
    from girih.passes.build.key import bundle_dir

    results = verify(bundle_dir())
    for bundle, fault in results:
        print(f"{bundle.key.digest} {bundle.model}: {fault or 'sound'}")
    damaged = sum(fault is not None for _, fault in results)
    print(f"{len(results)} bundles, {damaged} damaged")
    return 1 if damaged else 0
