"""`key=a,b` words to the points of a sweep, in Hydra's multirun grammar."""

from __future__ import annotations

import itertools
import re
import typing

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from girih.conf.files import group_options
from girih.kernels.base.errors import ConfigError

_BOOLEANS = {"True": "true", "False": "false"}  # Hydra gives them back as Python writes them
# A comma outside brackets and quotes, or a sweep function.
_SWEEPS = re.compile(r"=(glob|choice|range|interval)\(|=[^\[{'\"]*,")


def sweep_points(words: list[str]) -> list[list[str]]:
    """Return the words of every point: the product of all values, the last word varying fastest.

    `opt=O0,O1`, `opt=glob(O*)` and `max_num_seqs=range(1,9)` vary; `workloads=[a,b]` is one value.

    Raises:
        ConfigError: a word that Hydra cannot read.
    """
    choices = [_choices(word) if _SWEEPS.search(word) else [word] for word in words]
    return [list(point) for point in itertools.product(*choices)]


def _choices(word: str) -> list[str]:
    try:
        override: Override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"cannot read '{word}': {str(error).splitlines()[0]}") from error
    if not override.is_sweep_override():
        return [word]
    key = override.get_key_element()
    value = override.value()
    if isinstance(value, Glob):
        found = value.filter(group_options(key))
        if not found:
            raise ConfigError(f"'{word}' matches none of {', '.join(group_options(key))}")
        return [f"{key}={name}" for name in found]
    strings = typing.cast("typing.Iterator[str]", override.sweep_string_iterator())
    return [f"{key}={_BOOLEANS.get(text, text)}" for text in strings]
