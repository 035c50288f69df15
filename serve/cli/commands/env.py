"""`girih env`: a report of this machine to paste into a bug report."""

from __future__ import annotations

import json

from girih.conf.compose import compose_config
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print the report."""
    config = compose_config("env", words)
    from girih.serve.cli.environment import as_text, environment_report

    report = environment_report()
    print(json.dumps(report, indent=2) if config["json"] else as_text(report))
    return 0
