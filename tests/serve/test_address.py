"""Addresses of servers, as people write them."""

import pytest

from girih.kernels.base.errors import ConfigError
from girih.serve.address import server_root


@pytest.mark.parametrize(
    ("written", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("localhost:8000", "http://localhost:8000"),
        ("host/v1", "http://host"),
    ],
)
def test_the_root_of_an_address(written, root):
    assert server_root("url", written) == root


@pytest.mark.parametrize(
    "written", ["", "/tmp", "./x", "../x", "ftp://host", "http://", "http:///v1"]
)
def test_what_is_no_address(written):
    with pytest.raises(ConfigError, match=r"url is '.*'; it must be an address such as http://127"):
        server_root("url", written)
