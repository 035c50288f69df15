"""Addresses of servers, as people write them."""

from __future__ import annotations

from girih.kernels.base.errors import ConfigError


def server_root(key: str, url: str) -> str:
    """The root of a server's address: "localhost:8000/v1/" is "http://localhost:8000".

    Args:
        key: the setting that names it, for the message.
        url: what was written.

    Raises:
        ConfigError: no server can have this address.
    """
    scheme, found, rest = url.rpartition("://")
    scheme = scheme if found else "http"
    if scheme not in ("http", "https") or rest[:1] in ("", "/", "."):
        raise ConfigError(f"{key} is {url!r}; it must be an address such as http://127.0.0.1:8000")
    return f"{scheme}://{rest.rstrip('/').removesuffix('/v1')}"
