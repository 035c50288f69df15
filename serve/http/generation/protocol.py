"""Fields of the two OpenAI generation routes and of the tokenizer routes, with their types.

Values are checked by `sampling`. A field named here is obeyed or refused, unless nobody misses its
effect; such ones, and fields that are not named here, are told in the header `x-girih-ignored`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.bodies import Body, Integer, Part


def described(text: str, **schema: Any) -> Any:
    """An optional field (null is the same as absent) with its words for the OpenAPI document.

    Args:
        text: what it does.
        schema: further JSON Schema keywords (documentation: `sampling` does the checks).
    """
    return Field(default=None, description=text, json_schema_extra=schema)


MESSAGES_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "description": "The text, whole or in parts of type text.",
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": ["object", "string"],
                            "required": ["text"],
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                        },
                    },
                    {"type": "null"},
                ],
            },
        },
    },
    "examples": [[{"role": "user", "content": "Why is the sky blue?"}]],
}


class StreamOptions(Part):
    """`stream_options` of a request."""

    include_usage: bool | None = described("Send token counts in a last chunk.")
    continuous_usage_stats: bool | None = described(
        "Send running token counts in every chunk (needs include_usage)."
    )


class SamplerFields(Body):
    """Fields of sampling and stopping: the same on every route with all of them."""

    temperature: float | None = described("0 is greedy.", minimum=0, maximum=2)
    top_p: float | None = described("Nucleus mass.", exclusiveMinimum=0, maximum=1)
    top_k: Integer | None = described("Best k tokens; 0 and -1 are off.", minimum=-1)
    min_p: float | None = described("Least share of the best probability.", minimum=0, maximum=1)
    presence_penalty: float | None = described("Flat penalty of repeats.", minimum=-2, maximum=2)
    frequency_penalty: float | None = described("Penalty per repeat.", minimum=-2, maximum=2)
    repetition_penalty: float | None = described(
        "Above 1 discourages tokens of prompt and output.", exclusiveMinimum=0
    )
    seed: Integer | None = described("The same seed gives the same draw.")
    stop: str | list[str] | None = described("Strings that end the output.", minLength=1)
    stop_token_ids: list[Integer] | None = described("Tokens that end the output.")
    ignore_eos: bool | None = described("Go on after the model's end token.")
    min_tokens: Integer | None = described("No end before this many tokens.", minimum=0)


SAMPLER_FIELDS = tuple(SamplerFields.model_fields)
"""Their names."""


class FormFields(Body):
    """Fields of structured output: the same on every route that generates."""

    unset_when_empty: ClassVar[tuple[str, ...]] = ("grammar", "ebnf", "regex")

    structured_outputs: dict[str, Any] | None = described(
        "Form of the output: one of json, regex, choice, grammar, json_object, structural_tag.",
        examples=[{"choice": ["yes", "no"]}],
    )
    guided_json: dict[str, Any] | bool | str | None = described("Same as structured_outputs.json.")
    guided_regex: str | None = described("Same as structured_outputs.regex.")
    guided_choice: list[str] | None = described("Same as structured_outputs.choice.")
    guided_grammar: str | None = described("Same as structured_outputs.grammar.")
    structural_tag: dict[str, Any] | str | None = described(
        "Same as structured_outputs.structural_tag."
    )
    json_schema: dict[str, Any] | bool | str | None = described("Same as structured_outputs.json.")
    grammar: str | None = described("Same as structured_outputs.grammar: GBNF or Lark.")
    ebnf: str | None = described("Same as grammar.")
    regex: str | None = described("Same as structured_outputs.regex.")


FORM_FIELDS = tuple(FormFields.model_fields)
"""Their names."""


class SamplingBody(SamplerFields, FormFields):
    """Fields that chat and text completions share."""

    not_supported: ClassVar[tuple[str, ...]] = (
        "guided_whitespace_pattern",
        "use_beam_search",
        "length_penalty",
        "logprob_token_ids",
        "prompt_embeds",
        "thinking_token_budget",
        "repetition_detection",
        "kv_transfer_params",
        "watermarking",
    )
    unset_when_empty = (*not_supported, "request_id")

    model: str | None = described("The served model; it may be left out.")
    n: Integer | None = described("Choices per prompt.", minimum=1)
    stream: bool | None = described("Send the answer as server-sent events.")
    stream_options: StreamOptions | None = described("What a stream also carries.")
    stream_interval: Integer | None = described("Fewest tokens per chunk.", minimum=1)
    include_stop_str_in_output: bool | None = described("Keep the stop string in the text.")
    max_tokens: Integer | None = described("Longest output in tokens.", minimum=0)
    logit_bias: dict[str, float] | None = described(
        "Token id → value from -100 to 100 added to its logit."
    )
    allowed_token_ids: list[Integer] | None = described("Only these tokens.", minItems=1)
    bad_words: list[str] | None = described("Words that are never produced.")
    skip_special_tokens: bool | None = described("Leave control tokens out of the text.")
    prompt_logprobs: Integer | None = described("Alternatives per prompt token.", minimum=0)
    truncate_prompt_tokens: Integer | None = described(
        "Keep this many tokens at the end of the prompt; -1 as many as fit.", minimum=-1
    )
    return_token_ids: bool | None = described("Add token ids to the answer.")
    return_tokens_as_token_ids: bool | None = described('Name tokens "token_id:N" in logprobs.')
    cache_salt: str | None = described(
        "Prompts share cached prefixes only with equal salts.", minLength=1, maxLength=128
    )
    priority: Integer | None = described("Lower is served first (policy priority only).")
    vllm_xargs: dict[str, Any] | None = described("Arguments of the server's logits processors.")
    request_id: str | None = described("Id of the answer; the header x-request-id wins.")
    response_format: dict[str, Any] | None = described(
        "Form of the output: text, json_object, json_schema or structural_tag.",
        examples=[{"type": "json_object"}],
    )

    guided_whitespace_pattern: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    watermarking: Any = None


class CompletionRequest(SamplingBody):
    """Body of /v1/completions."""

    unset_when_empty = ("suffix",)

    prompt: str | list[Integer] | list[str] | list[list[Integer]] | None = described(
        "A text, token ids, or a list of either.", examples=["Once upon a time", [[1, 2, 3]]]
    )
    suffix: str | None = described(
        "Text after the completion (models with fill-in-the-middle tokens)."
    )
    logprobs: Integer | None = described("Alternatives per output token.", minimum=0)
    echo: bool | None = described("Put the prompt before the text.")
    add_special_tokens: bool | None = described("Begin the prompt as the model expects.")
    best_of: Integer | None = described("Only n itself is allowed.", minimum=1)


class RenderingBody(Body):
    """Fields that turn a conversation into a prompt."""

    unset_when_empty: ClassVar[tuple[str, ...]] = ("tools", "documents")

    messages: list[dict[str, Any]] | None = described("The conversation.", **MESSAGES_SCHEMA)
    add_generation_prompt: bool | None = described("Open the assistant's turn at the end.")
    continue_final_message: bool | None = described("Continue the last message.")
    add_special_tokens: bool | None = described("Add what the tokenizer adds to plain text.")
    chat_template: str | None = described(
        "Names one of the model's templates; where allowed, the text of another one."
    )
    chat_template_kwargs: dict[str, Any] | None = described("Further names for the template.")
    tools: list[dict[str, Any]] | None = described("Functions the model may call.")
    documents: list[dict[str, Any]] | None = described("Texts for templates that cite them.")
    reasoning_effort: str | None = described(
        "How long to think, for templates that know it.",
        examples=["none", "minimal", "low", "medium", "high"],
    )


def refuse_for_messages(body: RenderingBody, *shared: str) -> None:
    """Raise `RequestError` for a field that works on messages, of which a body has none.

    Args:
        body: the request.
        shared: fields that work on its text too.
    """
    for name in RenderingBody.model_fields:
        if name not in ("messages", *shared) and getattr(body, name) is not None:
            raise RequestError(
                f"{name} is set, but it is for messages, which are not given; leave it out", name
            )


class ChatCompletionRequest(RenderingBody, SamplingBody):
    """Body of /v1/chat/completions."""

    not_supported: ClassVar[tuple[str, ...]] = (
        *SamplingBody.not_supported,
        "functions",
        "function_call",
        "audio",
    )
    unset_when_empty = ("functions", "function_call", "audio", "modalities")

    max_completion_tokens: Integer | None = described("Longest output in tokens.", minimum=1)
    logprobs: bool | None = described("Report log-probabilities of output tokens.")
    top_logprobs: Integer | None = described("Alternatives per output token.", minimum=0)
    echo: bool | None = described("Put the continued assistant message before the text.")
    tool_choice: str | dict[str, Any] | None = described(
        "none, auto, required or one of the tools.",
        examples=["auto", {"type": "function", "function": {"name": "get_weather"}}],
    )
    parallel_tool_calls: bool | None = described("Allow several calls in one answer.")
    include_reasoning: bool | None = described("Show the reasoning (default true).")
    modalities: list[str] | None = described('Only ["text"].')

    functions: Any = None
    function_call: Any = None
    audio: Any = None


class TokenizeRequest(RenderingBody):
    """Body of /tokenize: `prompt` or `messages`."""

    model: str | None = described("The served model; it may be left out.")
    prompt: str | None = described("The text.", examples=["Hello!"])
    return_token_strs: bool | None = described("Add the text of every token.")


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = described("The served model; it may be left out.")
    tokens: list[Integer] = Field(description="Token ids.", examples=[[1, 2, 3]])
    skip_special_tokens: bool | None = described("Leave control tokens out of the text.")
