"""When Python looks for garbage cycles.

Starting an engine makes hundreds of thousands of objects that stay. Looking through them finds
nothing and takes half a second each time, in which no token comes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage inside; what is made there is not looked at soon afterwards either."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:  # `unfreeze` makes all that was set aside old
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def set_aside() -> None:
    """Never look at what exists now, until `collect`: for processes that serve."""
    gc.freeze()
    gc.enable()


def collect() -> None:
    """Look at everything at once, also at what was set aside."""
    was_set_aside = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_set_aside:
        gc.freeze()
