"""From `response_format`, `structured_outputs` and the guided fields to a `StructuredOutput`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.gbnf import is_gbnf
from girih.runtime.structured.lark import control_tokens
from girih.runtime.structured.tag_grammar import grammars_of
from girih.serve.http.generation.protocol import SamplingBody
from girih.serve.text.tokenizer import Tokenizer

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
SETTINGS = ("disable_any_whitespace", "disable_additional_properties", "backend")
ALONE = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "grammar": "grammar",
    "ebnf": "grammar",
    "regex": "regex",
}
"""Fields that are one form by themselves, as other servers call them."""


def structured_output(body: SamplingBody, tokenizer: Tokenizer) -> StructuredOutput | None:
    """Return the form that a body asks for, None for free text.

    Raises:
        RequestError: more than one form, or one that is not known or damaged.
    """
    form = _asked_form(body)
    if form is None:
        return None
    for grammar in grammars_of(form):
        for token in () if is_gbnf(grammar) else control_tokens(grammar):
            if not _is_control_token(token, tokenizer):
                raise form.error(f"the grammar names {token[:80]}, which is no control token here")
    return form


def _is_control_token(token: str, tokenizer: Tokenizer) -> bool:
    if token.startswith("<["):
        return all(int(n) < tokenizer.vocab_size for n in re.findall("[0-9]+", token))
    token_id = tokenizer.token_id(token)
    return token_id is not None and tokenizer.is_special(token_id)


def _asked_form(body: SamplingBody) -> StructuredOutput | None:
    given = {name: getattr(body, name) for name in ("response_format", "structured_outputs")}
    given |= {name: getattr(body, name) for name in ALONE}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked.get("response_format", {}).get("type") == "text":
        del asked["response_format"]
    if len(asked) > 1:
        names = " and ".join(asked)
        raise RequestError(f"{names} are both set; choose one", param=list(asked)[1])
    if not asked:
        return None
    name, value = asked.popitem()
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    return _of_form(ALONE[name], value, {"param": name})


def _of_response_format(value: dict[str, Any]) -> StructuredOutput:
    param, kind = "response_format", value.get("type")
    if kind == "json_object":
        return StructuredOutput.json_object(param=param)
    if kind == "structural_tag":
        return StructuredOutput.structural_tag(value, param=param)
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {str(kind)[:80]!r}; it must be text, json_object, "
            "json_schema or structural_tag",
            param=param,
        )
    described = value.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise RequestError(
            "response_format.json_schema needs a name and a schema; "
            f"it has {sorted(described)[:9] if isinstance(described, dict) else 'no fields'}",
            param=param,
        )
    return StructuredOutput.json_schema(
        described["schema"], param=param, is_closed=bool(described.get("strict"))
    )


def _of_structured_outputs(value: Any) -> StructuredOutput:
    param = "structured_outputs"
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object", param=param)
    asked = {name: v for name, v in value.items() if v is not None}
    unknown = sorted(set(asked) - {*FORMS, *SETTINGS})
    if unknown:
        raise RequestError(
            f"{param} has the field {unknown[0][:80]!r}; it may have {', '.join(FORMS)} and "
            f"{', '.join(SETTINGS)}",
            param=param,
        )
    forms = [name for name in FORMS if name in asked]
    if len(forms) != 1:
        raise RequestError(
            f"{param} sets {' and '.join(forms) or 'no form'}; it must set one of "
            f"{', '.join(FORMS)}",
            param=param,
        )
    fields: dict[str, Any] = {"param": param}
    if asked.get("disable_any_whitespace"):
        fields["is_compact"] = True
    if asked.get("disable_additional_properties"):
        fields["is_closed"] = True
    if "backend" in asked:
        fields["backend"] = {"guidance": "llguidance"}.get(asked["backend"], asked["backend"])
    return _of_form(forms[0], asked[forms[0]], fields)


def _of_form(form: str, value: Any, fields: dict[str, Any]) -> StructuredOutput:
    if form == "json_object":
        if value is not True:
            raise RequestError(
                f"{fields['param']}.json_object is {value!r}; it must be true, or left out",
                param=fields["param"],
            )
        return StructuredOutput.json_object(**fields)
    makers: dict[str, Callable[..., StructuredOutput]] = {
        "json": StructuredOutput.json_schema,
        "regex": StructuredOutput.regex,
        "choice": StructuredOutput.choice,
        "grammar": StructuredOutput.grammar,
        "structural_tag": StructuredOutput.structural_tag,
    }
    return makers[form](value, **fields)
