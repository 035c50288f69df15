"""The page at /docs: the OpenAPI document for people, without scripts or foreign files."""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
from typing import Any

from fastapi import APIRouter, Request, Response
from jinja2 import Environment
from markupsafe import Markup

from girih.serve.http.admin.web import HEADERS
from girih.serve.http.openapi import ERRORS, ROUTES, make_document
from girih.serve.web import HTML, read_file

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return the reference of all routes."""
    needs_key = bool(request.app.state.server.config.api_keys)
    page = await asyncio.to_thread(make_page, needs_key)  # some 0.1 s, the first time
    return Response(page, media_type=HTML, headers=HEADERS)


@functools.cache
def make_page(needs_key: bool) -> str:
    """Return the HTML of the reference.

    Args:
        needs_key: whether the server was given API keys.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(type_of=type_of, range_of=range_of, command_of=command_of)
    template = environment.from_string(read_file("docs.html").decode())
    document = make_document(needs_key)
    bodies = {route.body.__name__ for route in ROUTES.values() if route.body is not None}
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            entry = (method.upper(), path, operation)
            groups.setdefault(operation["tags"][0], []).append(entry)
    schemas = document["components"]["schemas"]
    return template.render(
        document=document, groups=groups, schemas=schemas, bodies=bodies, errors=ERRORS
    )


def type_of(schema: dict[str, Any]) -> Markup:
    """Return the words for what values a schema takes, null aside."""
    if "$ref" in schema:
        return Markup('<a href="#{0}">{0}</a>').format(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [type_of(kind) for kind in schema["anyOf"] if kind != {"type": "null"}]
        return Markup(" or ").join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(", ").join(
            Markup("<code>{}</code>").format(value) for value in values if value is not None
        )
    kind = schema.get("type", "any value")
    if kind == "array" and "items" in schema:
        return Markup("list of {}").format(type_of(schema["items"]))
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return Markup("object of {}").format(type_of(schema["additionalProperties"]))
    return Markup(" or ").join([kind] if isinstance(kind, str) else kind)


def range_of(schema: dict[str, Any]) -> str:
    """Return the words for the limits of a value and for its default."""
    low, above, high = (schema.get(n) for n in ("minimum", "exclusiveMinimum", "maximum"))
    words = []
    if low is not None:
        words.append(f"{low} to {high}" if high is not None else f"at least {low}")
    elif above is not None:
        words.append(f"above {above}" + (f" to {high}" if high is not None else ""))
    if schema.get("minLength") or schema.get("minItems"):
        words.append("not empty")
    if "maxLength" in schema:
        words.append(f"at most {schema['maxLength']} characters")
    if schema.get("default") is not None:
        words.append(f"default {json.dumps(schema['default'])}")
    return ", ".join(words)


def command_of(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return a curl command for a request; $URL and $KEY are the reader's."""
    words = ["curl", f'"$URL{path}"']
    if method not in ("GET", "POST"):
        words[1:1] = ["-X", method]
    if operation.get("security"):
        words += ["-H", '"authorization: Bearer $KEY"']
    body = operation.get("requestBody")
    if body is not None:
        example = body["content"]["application/json"]["example"]
        words += ["-H", "'content-type: application/json'"]
        words += ["-d", shlex.quote(json.dumps(example, ensure_ascii=False))]
    elif method == "POST":
        words[1:1] = ["-X", method]
    return " ".join(words)
