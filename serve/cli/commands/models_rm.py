"""`girih models rm`: remove a model's files from this machine."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.serve.cli.environment import readable_bytes
from girih.serve.cli.local_models import remove_model
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Remove one model and print what went."""
    name = compose_config("models rm", words)["name"]
    if not name:
        raise ConfigError("which model? Write `girih models rm NAME`; `girih models` lists them")
    model = remove_model(name)
    print(f"removed {model.path} ({readable_bytes(model.num_bytes)})")
    return 0
