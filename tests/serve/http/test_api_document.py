"""The OpenAPI document: complete, true, and survived by the server."""

import html.parser
import http.client
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import jsonschema
import pytest
from support_serving import RunningServer

from girih.serve.http import answers
from girih.serve.http.openapi import ROUTES, make_document
from girih.serve.http.openapi_links import LINKS
from girih.serve.http.reference import command_of, range_of, type_of

PAGES = ("/openapi.json", "/docs", "/metrics", "/admin", "/web", "/static", "/status")
NAMED = {"{name}": "fake", "{response_id}": "resp_kept"}


@pytest.fixture(scope="module")
def server():
    with RunningServer(sampling={"max_tokens": 2}) as running:
        yield running


def checked(document, model, body):
    """Raise unless `body` has the shape of `model`."""
    schema = {
        "$ref": f"#/components/schemas/{model.__name__}",
        "components": document["components"],
    }
    jsonschema.validate(body, schema)


def flat_routes(routes):
    """Routes, those of included routers too."""
    for route in routes:
        router = getattr(route, "original_router", None)
        yield from [route] if router is None else flat_routes(router.routes)


def test_every_route_is_described(server):
    actual = {
        f"{method} {route.path}".replace(":path", "")
        for route in flat_routes(server.server.app.routes)
        for method in getattr(route, "methods", ())
        if method != "HEAD"
    }
    actual = {
        name for name in actual if not name.endswith(" /") and not name.split()[1].startswith(PAGES)
    }
    assert actual == set(ROUTES)


def test_every_example_works_and_answers_have_their_shape(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document == make_document(needs_key=False)
    kept = {"input": "keep", "request_id": "kept", "background": True}
    assert server.post("/v1/responses", **kept).status_code == 200
    for name, route in sorted(ROUTES.items(), key=lambda item: item[0].startswith("DELETE")):
        if route.tasks:  # `test_pooling` has models for these
            continue
        method, _, path = name.partition(" ")
        for part, value in NAMED.items():
            path = path.replace(part, value)
        answer = httpx.request(method, server.url + path, json=route.example, timeout=20)
        assert answer.status_code == 200, (name, answer.text)
        checked(document, route.answer, answer.json())


def test_head_is_get_without_the_body(server):
    paths = {
        route.path for route in flat_routes(server.server.app.routes) if "GET" in route.methods
    }
    assert paths > {"/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/openapi.json"}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for path in sorted(paths):
        for part, value in {"{name:path}": "fake", "{response_id}": "resp_none"}.items():
            path = path.replace(part, value)
        heads = []
        for method in ("HEAD", "GET"):  # one connection: bytes left behind would be the next head
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            heads.append((answer.status, answer.headers["content-type"]))
            assert bool(body) == (method == "GET")
            assert int(answer.headers["content-length"]) > 0
        assert heads[0] == heads[1], path
    connection.close()
    refused = httpx.head(f"{server.url}/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_links_lead_to_operations_of_the_document():
    document = make_document(needs_key=False)
    operations = {
        operation["operationId"]: operation
        for path in document["paths"].values()
        for operation in path.values()
    }
    followed = 0
    for operation in operations.values():
        for link in operation["responses"]["200"].get("links", {}).values():
            target = operations[link["operationId"]]
            named = {p["name"] for p in target.get("parameters", ()) if p["required"]}
            assert set(link.get("parameters", {})) == named
            assert ("requestBody" in link) == ("requestBody" in target)
            followed += 1
    assert followed == sum(map(len, LINKS.values()))


def test_errors_have_their_shape(server):
    document = make_document(needs_key=True)
    for path in ("/v1/completions", "/v1/messages", "/v1/nothing"):
        checked(document, answers.Error, server.post(path, prompt=1).json())
    assert document["paths"]["/v1/completions"]["post"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]


ALL = (
    "--phases",
    "examples,fuzzing",
    "--max-examples",
    "6",
    "--max-time",
    "6",
    "--exclude-checks=positive_data_acceptance",
)
FOLLOWED = (
    *("--phases", "stateful", "--max-examples", "4", "--include-path-regex", "/responses"),
    "--exclude-checks=positive_data_acceptance,ensure_resource_availability",  # store=false
)


@pytest.mark.parametrize("phases", [ALL, FOLLOWED], ids=["all routes", "links"])
def test_generated_requests_break_nothing(server, tmp_path, phases):
    """Short runs of schemathesis; what a long one is called with is in serve/http/README.md."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"{server.url}/openapi.json", *phases),
        *("--seed", "1", "--request-timeout", "10", "--continue-on-failure", "--no-color"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    server.wait_idle()
    if phases is FOLLOWED:
        assert re.search("[1-7] covered / 7 selected", done.stdout)


class Outline(html.parser.HTMLParser):
    """What a page links to, which places it has, and what a reader sees."""

    def __init__(self, page):
        super().__init__()
        self.links, self.loaded, self.places, self.texts = [], [], [], []
        self.feed(page)
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert not {name for name in given if name.startswith("on") or name == "style"}
        self.places += [given["id"]] if "id" in given else []
        links = self.links if tag == "a" else self.loaded
        links += [value for name in ("href", "src") if (value := given.get(name)) is not None]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_reference_shows_the_whole_document(new_server):
    for keys in ((), ("secret",)):
        server = new_server(serve={"api_keys": keys})
        answer = server.get("/docs")
        page, document = Outline(answer.text), server.get("/openapi.json").json()
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "<script" not in answer.text
        assert sorted(page.loaded) == ["/web/docs.css", "/web/icon.svg"]
        assert server.get("/web/docs.css").headers["content-type"].startswith("text/css")
        for path, operations in document["paths"].items():
            for operation in operations.values():
                assert operation["operationId"] in page.places
                assert operation["summary"] in page.text
                assert path in page.text
        for name, schema in document["components"]["schemas"].items():
            assert name in page.text
            for field, kind in schema["properties"].items():
                assert field in page.text
                assert kind.get("description", "") in page.text
        assert len(page.places) == len(set(page.places))
        anchors = {link.removeprefix("#") for link in page.links if link.startswith("#")}
        assert anchors <= set(page.places)
        assert set(page.links) - {f"#{anchor}" for anchor in anchors} == {"/", "/openapi.json"}
        assert ("Bearer $KEY" in page.text) == bool(keys)


def test_commands_of_the_reference_work(server):
    page = Outline(server.get("/docs").text).text
    for path, operations in make_document(needs_key=False)["paths"].items():
        for method, operation in operations.items():
            command = command_of(method.upper(), path, operation)
            assert command in page
            if "description" in operation or "{" in path:
                continue  # for another model, or a response that was not made
            done = subprocess.run(
                ["bash", "-c", f"{command} -s -o /dev/null -w '%{{http_code}}'"],
                env={"URL": server.url, "PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.stdout == "200", (command, done.stdout, done.stderr)


@pytest.mark.parametrize(("schema", "kind", "limits"), [
    ({"type": "integer", "minimum": 1}, "integer", "at least 1"),
    ({"anyOf": [{"type": "number"}, {"type": "null"}], "exclusiveMinimum": 0, "maximum": 1},
     "number", "above 0 to 1"),
    ({"enum": ["a", None], "default": "a"}, "<code>a</code>", 'default "a"'),
    ({"const": "<b>"}, "<code>&lt;b&gt;</code>", ""),
    ({"type": "array", "items": {"$ref": "#/components/schemas/X"}, "minItems": 1},
     'list of <a href="#X">X</a>', "not empty"),
    ({"type": "object", "additionalProperties": {"type": ["number", "string"]}},
     "object of number or string", ""),
    ({"anyOf": [{"type": "string"}, {"type": "string"}], "maxLength": 3}, "string",
     "at most 3 characters"),
    ({}, "any value", ""),
])  # fmt: skip
def test_types_are_told_in_words(schema, kind, limits):
    assert (str(type_of(schema)), range_of(schema)) == (kind, limits)
