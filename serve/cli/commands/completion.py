"""`girih completion`: a script that teaches a shell to complete girih's words."""

from __future__ import annotations

from girih.kernels.base.errors import ConfigError
from girih.serve.cli.completion import SHELLS, script
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print the script of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        seen = f", not {' '.join(words)!r}" if words else ""
        raise ConfigError(f"`girih completion` needs one of: {', '.join(SHELLS)}{seen}")
    print(script(words[0]), end="")
    return 0
