"""`girih models`: the models that are built in or on this machine, with sizes."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.cli.environment import readable_bytes
from girih.serve.cli.local_models import LocalModel, local_models
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print one line per model, then how much disk they take."""
    compose_config("models", words)
    models = local_models()
    width = max(len(model.name) for model in models)
    for model in models:
        place = model.path or f"not here; `girih fetch {model.name}` downloads {_size(model)}"
        size = _size(model) if model.path else "-"
        print(f"{model.name:{width}s}  {model.kind:9s}  {size:>9s}  {place}")
    total = sum(model.num_bytes for model in models if model.path is not None)
    print(f"{readable_bytes(total)} on this disk; `girih models rm NAME` removes one")
    return 0


def _size(model: LocalModel) -> str:
    return readable_bytes(model.num_bytes)
