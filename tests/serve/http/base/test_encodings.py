"""Compressed request bodies: what they decode to, what is refused, and what a bomb may cost."""

import asyncio
import gzip
import itertools
import json
import tracemalloc
import zlib

import brotli
import httpx
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from girih.serve.http.base.encodings import CODINGS, DecodedBody
from girih.serve.http.base.errors import ApiError


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate without a header": raw_deflate,
    "br": lambda data: brotli.compress(data, quality=5),
    "zstd": zstd.compress,
}
each_coding = pytest.mark.parametrize("name", ENCODERS)


def coding_of(name):
    return name.removeprefix("x-").split()[0]


def decoded(coding, pieces, max_bytes=1 << 20):
    """What a body that arrives in these pieces is handed on as."""
    waiting = list(pieces)

    async def receive():
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def read():
        body = DecodedBody(receive, coding, max_bytes)
        parts = []
        while True:
            message = await body()
            parts.append(message["body"])
            if not message["more_body"]:
                return b"".join(parts)

    return asyncio.run(read())


def cut(data, places):
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@each_coding
@given(body=st.binary(max_size=300), places=st.lists(st.integers(0, 400), max_size=5))
def test_however_it_is_cut_a_body_is_what_was_compressed(name, body, places):
    pieces = cut(ENCODERS[name](body), places)
    assert decoded(coding_of(name), pieces, max_bytes=len(body)) == body
    assert decoded(coding_of(name), [*pieces, b""]) == body


@each_coding
def test_one_byte_too_many_is_a_413_that_names_the_limit(name):
    with pytest.raises(ApiError, match=r"more than 999 bytes.*serve\.max_body_bytes") as caught:
        decoded(coding_of(name), [ENCODERS[name](b"x" * 1000)], max_bytes=999)
    assert caught.value.status == 413


@each_coding
def test_a_bomb_costs_no_more_than_the_largest_body(name):
    limit = 2 << 20
    bomb = ENCODERS[name](bytes(64 << 20))
    tracemalloc.start()
    try:
        for pieces in ([bomb], cut(bomb, range(0, len(bomb), 4096))):
            with pytest.raises(ApiError, match="more than"):
                decoded(coding_of(name), pieces, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * limit


@each_coding
def test_damage_is_told(name):
    whole = ENCODERS[name](b"some text, some more text" * 9)
    middle = len(whole) // 2
    ends_early = ([whole[:-1]], [whole[:middle]], [whole[:middle], b""])
    goes_on = ([whole + b"more"], [whole, b"more"], [whole, whole])
    for pieces in (*ends_early, *goes_on, [b"\xff" + whole]):
        with pytest.raises(ApiError, match=coding_of(name)) as caught:
            decoded(coding_of(name), pieces)
        assert caught.value.status == 400
        assert ("ends before" in caught.value.message) == (pieces in ends_early)


def test_a_window_above_what_senders_may_use_is_refused():
    options = {zstd.CompressionParameter.window_log: 27}
    packer = zstd.ZstdCompressor(options=options)
    with pytest.raises(ApiError, match="too much memory"):
        decoded("zstd", [packer.compress(b"x" * 100) + packer.flush()])


BODY = {"prompt": "Hello, 世界", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def send(server, coding, content):
    headers = {"content-encoding": coding, "content-type": "application/json"}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, headers=headers, content=content, timeout=30)


@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip", "deflate", "br", "zstd", "identity"])
def test_a_compressed_request_is_answered_as_a_plain_one(shared_server, name):
    raw = json.dumps(BODY).encode()
    plain = shared_server.post("/v1/completions", **BODY).json()["choices"]
    encode = ENCODERS.get(name.lower(), bytes)
    assert send(shared_server, name, encode(raw)).json()["choices"] == plain
    in_pieces = iter(cut(encode(raw), range(0, 400, 7)))
    assert send(shared_server, name, in_pieces).json()["choices"] == plain


@pytest.mark.parametrize("name", ["compress", "gzip, br", "lzma"])
def test_other_codings_are_a_415_that_names_these(shared_server, name):
    answer = send(shared_server, name, b"x")
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, br, zstd" == ", ".join(CODINGS)
    assert answer.headers["accept-encoding"] in answer.json()["error"]["message"]
    plain = httpx.post(f"{shared_server.url}/v1/completions", headers={"content-type": "a/b"})
    assert plain.status_code == 415
    assert "accept-encoding" not in plain.headers  # the coding was not what is wrong


def test_the_limit_of_the_server_holds_for_what_was_compressed(new_server):
    server = new_server(serve={"max_body_bytes": 2000})
    for name, encode in ENCODERS.items():
        big = send(server, coding_of(name), encode(json.dumps({"prompt": "x" * 3000}).encode()))
        assert big.status_code == 413
        assert "2000" in big.json()["error"]["message"]
        small = send(server, coding_of(name), encode(json.dumps({**BODY, "n": 1}).encode()))
        assert small.status_code == 200
    assert send(server, "gzip", b"nonsense").json()["error"]["type"] == "invalid_request_error"
