"""Values that say nothing, or nothing here: they harm no request, and a header names them."""

import pytest
from support_serving import RunningServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
INPUT = {"input": "hi", "max_output_tokens": 2}
IDS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}

# (route, a body that works, what is added to it, what the header names)
IGNORED = [
    ("/v1/completions", TEXT, {"suffix": ""}, "suffix"),
    ("/v1/completions", TEXT, {"request_id": "", "prompt_embeds": []}, "prompt_embeds, request_id"),
    ("/v1/completions", TEXT, {"stream_options": {}}, "stream_options"),
    ("/v1/completions", TEXT, {"stream_options": {"include_usage": False}}, "stream_options"),
    ("/v1/chat/completions", CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice, tools"),
    ("/v1/chat/completions", CHAT, {"tools": [], "tool_choice": "none"}, "tools"),
    ("/v1/chat/completions", CHAT, {"parallel_tool_calls": True}, "parallel_tool_calls"),
    ("/v1/chat/completions", CHAT, {"functions": [], "function_call": "auto"},
     "function_call, functions"),
    ("/v1/chat/completions", CHAT, {"function_call": "none"}, "function_call"),
    ("/v1/chat/completions", CHAT, {"modalities": [], "audio": {}}, "audio, modalities"),
    ("/v1/chat/completions", CHAT, {"documents": []}, "documents"),
    ("/v1/chat/completions", CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
    ("/v1/chat/completions", CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", CHAT, {"chat_template_kwargs": {"enable_thinking": True}},
     "chat_template_kwargs.enable_thinking"),
    ("/v1/responses", INPUT, {"truncation": "auto", "tools": []}, "tools, truncation"),
    ("/v1/responses", INPUT, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ("/v1/responses", INPUT, {"reasoning": {"effort": "minimal", "summary": "auto"}},
     "reasoning.effort, reasoning.summary"),
    ("/v1/responses", INPUT, {"previous_response_id": "", "conversation": ""},
     "conversation, previous_response_id"),
    ("/v1/messages", CHAT, {"thinking": {"type": "enabled"}}, "thinking"),
    ("/v1/messages", CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}},
     "thinking, thinking.budget_tokens"),
    ("/v1/messages", CHAT, {"chat_template_kwargs": {"enable_thinking": True}},
     "chat_template_kwargs.enable_thinking"),
    ("/v1/messages", CHAT, {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("/v1/messages", CHAT, {"tools": [], "tool_choice": {"type": "auto"}}, "tool_choice, tools"),
    ("/v1/messages", CHAT, {"tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
     "tool_choice.disable_parallel_tool_use"),
    ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}, {"thinking": {"type": "enabled"}},
     "thinking"),
    ("/tokenize", {"prompt": "hi"}, {"tools": [], "documents": []}, "documents, tools"),
    ("/tokenize", {"messages": CHAT["messages"]}, {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/inference/v1/generate", IDS, {"stream_options": {}, "request_id": ""},
     "request_id, stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "added", "named"), IGNORED)
def test_what_harms_nobody_is_ignored_and_named(shared_server, path, body, added, named):
    may_stream = "stream_options" not in added and "token" not in path
    for stream in (False, True) if may_stream else (False,):
        options = {"stream": True} if stream else {}
        plain = shared_server.post(path, **body, **options)
        answer = shared_server.post(path, **body, **added, **options)
        assert (plain.status_code, answer.status_code) == (200, 200), answer.text
        assert "x-girih-ignored" not in plain.headers
        assert answer.headers["x-girih-ignored"] == named


def test_what_is_null_or_in_effect_is_not_named(shared_server):
    nulls = dict.fromkeys(("tools", "tool_choice", "reasoning_effort", "functions", "audio"))
    assert "x-girih-ignored" not in shared_server.post(
        "/v1/chat/completions", **CHAT, **nulls, stream_options=None
    ).headers  # fmt: skip
    with RunningServer(serve={"trust_request_chat_template": True}) as server:
        template = "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].content }}"
        asked = {**CHAT, "chat_template": template}
        for fields in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"messages_": 1}}):
            answer = server.post("/v1/chat/completions", **asked, **fields)
            assert answer.status_code == 200
            unused = "chat_template_kwargs.messages_" if "reasoning_effort" not in fields else None
            assert answer.headers.get("x-girih-ignored") == unused


@pytest.mark.parametrize(("path", "body", "added", "param"), [
    ("/v1/chat/completions", CHAT, {"tool_choice": "required", "tools": []}, "tool_choice"),
    ("/v1/chat/completions", CHAT, {"function_call": {"name": "f"}}, "function_call"),
    ("/v1/chat/completions", CHAT, {"documents": [{"text": "x"}]}, "documents"),
    ("/v1/completions", TEXT, {"suffix": " "}, "suffix"),
    ("/v1/completions", TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/responses", INPUT, {"truncation": "some"}, "truncation"),
    ("/v1/responses", INPUT, {"prompt": {"id": "p"}}, "prompt"),
])  # fmt: skip
def test_what_would_be_missed_is_refused(shared_server, path, body, added, param):
    answer = shared_server.post(path, **body, **added)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
