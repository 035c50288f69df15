"""From a body with messages to a prompt, through the model's chat template."""

from __future__ import annotations

import functools
import logging
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.serve.config import ServeConfig
from girih.serve.http.base.errors import renamed_params
from girih.serve.http.base.state import Served
from girih.serve.http.generation.protocol import RenderingBody
from girih.serve.http.generation.requests import LONG_BODY, refuse_endless
from girih.serve.text import generic_tools
from girih.serve.text.chat_template import ChatTemplate, pick_template

logger = logging.getLogger("girih.serve")

# Names of a template that have fields of their own.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "special_tokens",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def is_long(body: RenderingBody) -> bool:
    """Return whether a body needs a worker thread: it has long text, or schemas to check."""
    sizes = (len(str(message.get("content"))) for message in body.messages or ())
    return bool(body.tools) or sum(sizes) > LONG_BODY


def template_of(body: RenderingBody, served: Served, config: ServeConfig) -> ChatTemplate:
    """Return the template of a body's conversation.

    Raises:
        RequestError: the model has none, or the body brings one where it may not.
    """
    templates, wanted = served.tokenizer.chat_templates, body.chat_template
    if wanted is not None and wanted not in templates and not config.trust_request_chat_template:
        names = f" other than {', '.join(sorted(templates))}" if len(templates) > 1 else ""
        raise RequestError(
            f"chat_template is set, but this server takes no templates{names} from requests "
            "(serve.trust_request_chat_template is false); leave it out",
            param="chat_template",
        )
    return pick_template(templates, wanted, shows_tools(body))


def shows_tools(body: RenderingBody) -> bool:
    """Return whether the model is to know of a body's tools."""
    return bool(body.tools) and getattr(body, "tool_choice", None) != "none"


def render_messages(
    body: RenderingBody, served: Served, config: ServeConfig, opens_answer: bool = True
) -> list[int]:
    """Return the token ids of a body's conversation.

    Args:
        body: the request.
        served: the model.
        config: the server's settings.
        opens_answer: whether the assistant's turn is opened when the body does not say.

    Raises:
        RequestError: no messages, or the chat template refuses them.
    """
    if not body.messages:
        seen = "missing" if body.messages is None else "empty"
        raise RequestError(f"messages is {seen}; it must have at least one", param="messages")
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    template = template_of(body, served, config)
    variables = _variables(body, template)
    in_words = generic_tools.are_needed(template, config.tool_parser)
    if in_words and variables.get("tools"):
        _log_words(served.name)
    text = (generic_tools.render if in_words else ChatTemplate.render)(
        template,
        body.messages,
        served.tokenizer.special_tokens,
        add_generation_prompt=opens_answer and not continues if opens is None else opens,
        continue_final_message=continues,
        **variables,
    )
    with renamed_params({"prompt": "messages"}):
        if getattr(body, "truncate_prompt_tokens", None) is None:
            refuse_endless(text, served)
        return served.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))


@functools.cache
def _log_words(model: str) -> None:
    """Log it, once."""
    logger.warning(
        "the chat template of %s has none of the known formats of tool calls: tools are described "
        "in the system message, and calls are read as %s (serve.tool_parser names another format)",
        model,
        generic_tools.EXAMPLE.replace("\n", ""),
    )


def _variables(body: RenderingBody, template: ChatTemplate) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    if RESERVED & set(given):
        raise RequestError(
            f"chat_template_kwargs sets {sorted(RESERVED & set(given))}, which have fields of "
            "their own",
            param="chat_template_kwargs",
        )
    variables: dict[str, Any] = {}
    if body.tools is not None and getattr(body, "tool_choice", None) != "none":
        variables["tools"] = check_tools(body.tools)
    if body.documents is not None:
        if "documents" not in template.source:
            raise RequestError(
                "documents is set, but this model's chat template does not use it; leave it out",
                param="documents",
            )
        variables["documents"] = body.documents
    for name in given:
        if name not in template.source:
            body.ignore(f"chat_template_kwargs.{name}")
    return {**variables, **_thinking(body, template), **given}


def _thinking(body: RenderingBody, template: ChatTemplate) -> dict[str, Any]:
    effort = body.reasoning_effort
    if effort is None:
        return {}
    variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if not any(name in template.source for name in variables):
        body.ignore("reasoning_effort")
    return variables


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `tools` when each is a function with a name.

    Raises:
        RequestError: an entry has another form.
    """
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(
                f"tools[{index}] has type {tool.get('type')!r}; it must be "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}',
                param="tools",
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{index}].function.name is {name!r}; it must be a name", param="tools"
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise RequestError(
                f"tools[{index}].function.parameters must be a JSON schema", param="tools"
            )
        if not isinstance(function.get("strict"), bool | None):
            raise RequestError(
                f"tools[{index}].function.strict is {str(function['strict'])[:80]!r}; it must be "
                "true or false",
                param="tools",
            )
    return tools
