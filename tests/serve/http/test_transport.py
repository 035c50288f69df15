"""Browsers of other origins, and HTTPS, against a real server."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from girih.kernels.base.errors import ConfigError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import LocalTransport
from girih.serve.config import ServeConfig
from girih.serve.http.server import GirihServer

PAGE = "https://chat.example.com"
BODY = {"prompt": "one two", "max_tokens": 3, "ignore_eos": True}


def preflight(server, origin, path="/v1/completions"):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return httpx.options(server.url + path, headers=headers)


def test_pages_of_a_named_origin_may_call(new_server):
    server = new_server(serve={"cors_origins": (PAGE,), "api_keys": ("secret",)})
    asked = preflight(server, PAGE)  # without a key: browsers send none here
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    headers = {"origin": PAGE, "authorization": "Bearer secret"}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, headers=headers, json={**BODY, "nonsense": 1})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = httpx.post(url, headers={"origin": PAGE}, json=BODY)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page sees why


def test_pages_of_other_origins_may_not(new_server):
    server = new_server(serve={"cors_origins": (PAGE,)})
    assert preflight(server, "https://evil.example.com").status_code == 400
    answer = httpx.post(
        f"{server.url}/v1/completions", headers={"origin": "https://evil.example.com"}, json=BODY
    )
    assert "access-control-allow-origin" not in answer.headers


def test_without_origins_there_are_no_such_headers(shared_server):
    assert preflight(shared_server, PAGE).status_code == 405
    answer = shared_server.get("/version", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://", "ftp://x", "https://x/path"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match=r"serve\.cors_origins has .*scheme://host"):
        ServeConfig(cors_origins=(origin,))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate file, key file) for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; it makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = (str(folder / "cert.pem"), str(folder / "key.pem"))
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*new, *names, "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_a_server_with_a_certificate_speaks_https(new_server, certificate):
    server = new_server(serve={"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]})
    assert server.url.startswith("https://")
    assert server.post("/v1/completions", **BODY).status_code == 200
    lines = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**BODY, "stream": True}, verify=server.verify
    ) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert f"is ready at {server.url}" in server.lines[0]
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/version", verify=ssl.create_default_context())
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/version")


def test_a_certificate_that_cannot_be_used_is_named(certificate):
    cert, key = certificate

    def run(**serve):
        def build(progress):
            raise AssertionError("nothing may be built")

        client = CoreClient(LocalTransport(build))
        GirihServer(client, ServeConfig(port=0, **serve)).run()

    with pytest.raises(ConfigError, match=r"ssl_certfile=/nowhere.* No such file"):
        run(ssl_certfile="/nowhere/cert.pem")
    with pytest.raises(ConfigError, match=r"key in .*cert\.pem cannot be used"):
        run(ssl_certfile=cert)
    with pytest.raises(ConfigError, match="ssl_keyfile is set without"):
        ServeConfig(ssl_keyfile=key)
