"""Tools for a chat template that knows none: functions, calls and results as words in messages.

functions ─▶ the system message    calls ─▶ <tool_call>JSON</tool_call> in the assistant's
results ─▶ <tool_response> in a user's message
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.serve.text.chat_messages import plain_message
from girih.serve.text.chat_template import ChatTemplate
from girih.serve.text.parsers import hermes
from girih.serve.text.parsers.registry import choose, tool_formats

FORMAT = "hermes"
"""The instruction that tells the model how to write calls."""
EXAMPLE = f"""\
{hermes.START}
{{"name": "function name", "arguments": {{"parameter name": "value"}}}}
{hermes.END}"""
PROMPT = """\
You have these functions. Each line is one of them, with a JSON schema of its parameters:
{functions}

To use a function, write its name and arguments as JSON between the two marks, like this:
{example}
Its result is then given to you between <tool_response> and </tool_response>. If no function fits, \
answer in words."""


def are_needed(template: ChatTemplate, tool_parser: str) -> bool:
    """Return whether this template has no known tool format (see `serve.tool_parser`)."""
    known = choose(tool_formats(), tool_parser, template.source, "serve.tool_parser")
    return tool_parser == "auto" and known is None


def render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    special_tokens: dict[str, str],
    tools: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Return the prompt of a conversation, as `ChatTemplate.render` does, with tools in words.

    Args:
        template: it sees neither tools nor calls, unless only it knows how the latter were written.
        messages: the conversation.
        special_tokens: named tokens the template may use.
        tools: the functions; without any, only calls in the history become words.
        options: for the template.

    Raises:
        RequestError: the template refuses the messages.
    """
    if not tools and "tool_calls" in template.source:
        return template.render(messages, special_tokens, **options)
    worded = _worded([plain_message(message, index) for index, message in enumerate(messages)])
    if not tools:
        return template.render(worded, special_tokens, **options)
    prompt = _prompt(tools)
    system = worded[0] if worded and worded[0]["role"] in ("system", "developer") else None
    opening = {"role": "system", "content": prompt}
    if system is not None:
        opening = {**system, "content": f"{system['content']}\n\n{prompt}"}
    try:
        rest = worded if system is None else worded[1:]
        return template.render([opening, *rest], special_tokens, **options)
    except RequestError:
        # Some templates know no system; then the first of the user's messages tells it.
        first = next((m for m in worded if m["role"] == "user"), None)
        if system is None and first is not None:
            first["content"] = f"{prompt}\n\n{first['content']}"
            with contextlib.suppress(RequestError):
                return template.render(worded, special_tokens, **options)
        raise


def _prompt(tools: Sequence[dict[str, Any]]) -> str:
    shown = ("name", "description", "parameters")
    functions = [
        {name: tool["function"][name] for name in shown if tool["function"].get(name) is not None}
        for tool in tools
    ]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return PROMPT.format(functions=lines, example=EXAMPLE)


def _worded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain messages without calls and without the role of a tool.

    Results in a row, and the user's words after them, are one message: templates may want the
    roles to take turns.
    """
    worded: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if follows_result and role in ("tool", "user"):
            worded[-1]["content"] += f"\n{content}"
        elif role == "tool":
            worded.append({"role": "user", "content": content})
        else:
            calls = map(_call, message.get("tool_calls", ()))
            text = "\n".join([*([content] if content else []), *calls])
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            worded.append({**kept, "content": text})
        follows_result = role == "tool" or (follows_result and role == "user")
    return worded


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]  # a text where they are damaged
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{hermes.START}\n{{"name": {name}, "arguments": {arguments}}}\n{hermes.END}'
