"""Shapes of the answers, for the OpenAPI document (the writers make plain dicts)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ErrorDetail(BaseModel):
    """The error."""

    message: str = Field(description="What failed, the value seen, what is allowed.")
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None = Field(description="The field at fault.")
    code: str | None = Field(description="A short word, e.g. model_not_found.")


class Error(BaseModel):
    """The body of every answer that is an error."""

    type: Literal["error"]
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float = Field(description="Natural logarithm; -9999 stands for minus infinity.")
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]


class FunctionCall(BaseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    reasoning_content: str | None = Field(None, description="Same as reasoning.")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(description="The stop string or token that matched.")
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text choice, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins, in characters.")


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class GenerateChoice(BaseModel):
    """One continuation."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class Generation(BaseModel):
    """Answer of /inference/v1/generate."""

    request_id: str
    object: Literal["token_completion"]
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class OutputItem(BaseModel):
    """A message, reasoning or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete", "in_progress"]


class ResponseObject(BaseModel):
    """Answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress", "cancelled"]
    output: list[OutputItem]
    incomplete_details: dict[str, str] | None
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class DeletedResponse(BaseModel):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    """Answer of /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class ContentBlock(BaseModel):
    """Text, thinking or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(BaseModel):
    """Token counts; cached prompt tokens are not part of `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class Embedding(BaseModel):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[list[float]] | str = Field(
        description="Values, or base64 of little-endian float32; one list per token where the "
        "model pools nothing."
    )


class EmbeddingList(BaseModel):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledText(BaseModel):
    """The model's result for one text."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str = Field(
        description="As an embedding; of a classifier the values of its labels."
    )


class PooledList(BaseModel):
    """Answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: Usage


class ClassifiedText(BaseModel):
    """A classifier's result for one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(BaseModel):
    """Answer of /v1/classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: Usage


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(BaseModel):
    """Answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: Usage


class RankedDocument(BaseModel):
    """A document and how well it fits."""

    index: int = Field(description="Its place in the request.")
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(BaseModel):
    """Answer of /v1/rerank: the best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    task: Literal["generate", "embed", "classify"]
    has_chat_template: bool = Field(description="Whether it takes conversations (messages).")


class ModelDetails(ModelCard):
    """The served model with what it does when a request does not say."""

    default_sampling: dict[str, Any] | None = Field(
        description="Effective sampling defaults of a model that generates."
    )
    pooling: dict[str, Any] | None = Field(
        description="How one that embeds or classifies makes its vectors."
    )
    limits: dict[str, Any] = Field(description="Largest values this server takes.")


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of /health and /ping."""

    status: Literal["ok"]


class ServerLoad(BaseModel):
    """Answer of /load."""

    server_load: int = Field(
        description="Requests that are being answered, and responses that run in the background."
    )


class Readiness(BaseModel):
    """Answer of /ready."""

    status: Literal["ready", "loading", "draining", "failed"]
    seconds: float


class Version(BaseModel):
    """Answer of /version."""

    version: str
