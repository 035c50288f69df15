"""`girih models rm`: remove a model's files from this machine."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.kernels.errors import ConfigError
from girih.serve.commands import Options
from girih.serve.environment import readable_bytes
from girih.serve.local_models import remove_model


def run(words: list[str], options: Options) -> int:
    """Remove one model and print what went."""
    name = compose_config("models rm", words)["name"]
    if not name:
        raise ConfigError("which model? Write `girih models rm NAME`; `girih models` lists them")
    model = remove_model(name)
    print(f"removed {model.path} ({readable_bytes(model.num_bytes)})")
    return 0
