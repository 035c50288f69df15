"""Checks a server's host and port before anything is started."""

from __future__ import annotations

import contextlib
import socket
import ssl

from girih.kernels.base.errors import ConfigError, EngineError
from girih.serve.config import ServeConfig


def check_certificate(config: ServeConfig) -> None:
    """Raise `ConfigError` when the certificate and key cannot be used together."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: b"")
    except OSError as error:  # ssl's own errors are some of these
        key = config.ssl_keyfile or config.ssl_certfile
        raise ConfigError(
            f"serve.ssl_certfile={config.ssl_certfile} with the key in {key} cannot be used: "
            f"{error.strerror or error}; both are PEM files, the key without a password"
        ) from error


def open_port(host: str, port: int) -> socket.socket:
    """Bind the address.

    Raises:
        EngineError: it is in use, or not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with "
            "port=N or host=ADDRESS"
        ) from error
    listener.set_inheritable(True)
    return listener
