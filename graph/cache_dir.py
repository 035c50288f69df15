"""Where girih keeps what it fetched, converted or compiled: the only reader of GIRIH_CACHE_DIR."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Root of the user's cache (it may not exist yet).

    `$GIRIH_CACHE_DIR`, else `$XDG_CACHE_HOME/girih`, else `~/.cache/girih`.
    """
    own = os.environ.get("GIRIH_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "girih"
