"""Fields of the routes that make vectors, scores and classes."""

from __future__ import annotations

from typing import Any, ClassVar

from girih.serve.http.base.bodies import Body, Integer
from girih.serve.http.generation.protocol import RenderingBody, described

Texts = str | list[Integer] | list[str] | list[list[Integer]]


class PooledBody(Body):
    """Fields that these routes share."""

    not_supported: ClassVar[tuple[str, ...]] = ("normalize", "softmax", "activation")
    unset_when_empty: ClassVar[tuple[str, ...]] = ("request_id",)

    model: str | None = described("The served model; it may be left out.")
    truncate_prompt_tokens: Integer | None = described(
        "Keep this many tokens at the start of a text; -1 as many as the model takes. Without it a "
        "longer text is refused.",
        minimum=-1,
    )
    add_special_tokens: bool | None = described("Put the marks that the model expects.")
    use_activation: bool | None = described(
        "Bring embeddings to length 1, or make probabilities of label values."
    )
    cache_salt: str | None = described(
        "Texts share cached prefixes only with equal salts.", minLength=1, maxLength=128
    )
    priority: Integer | None = described("Lower is served first (policy priority only).")
    request_id: str | None = described("Id of the answer; the header x-request-id wins.")
    user: str | None = described("Not looked at.")

    normalize: Any = None
    softmax: Any = None
    activation: Any = None


class TextsBody(PooledBody, RenderingBody):
    """Texts, or one conversation in `messages` through the chat template."""

    input: Texts | None = described(
        "A text, token ids, or a list of either.", examples=["Hello!", ["Hello!", "Bye."]]
    )
    add_generation_prompt: bool | None = described(
        "Open the assistant's turn after the messages (default false)."
    )


class EmbeddingRequest(TextsBody):
    """Body of /v1/embeddings."""

    encoding_format: str | None = described(
        "float, or base64 of little-endian float32.", enum=["float", "base64", None]
    )
    dimensions: Integer | None = described(
        "Cut embeddings to their first values (models made for it).", minimum=1
    )


class ClassifyRequest(TextsBody):
    """Body of /v1/classify."""


class PoolingRequest(EmbeddingRequest):
    """Body of /pooling."""

    task: str | None = described(
        "What the model is for; it may be left out.", enum=["embed", "classify", None]
    )


class ScoreRequest(PooledBody):
    """Body of /v1/score; the two sides have several names."""

    text_1: str | list[str] | None = described("One text, or as many as in text_2.")
    text_2: str | list[str] | None = described("What it is held against.")
    data_1: str | list[str] | None = described("Same as text_1.")
    data_2: str | list[str] | None = described("Same as text_2.")
    queries: str | list[str] | None = described("Same as text_1.")
    documents: str | list[str] | None = described("Same as text_2.")
    items: str | list[str] | None = described("Same as text_2.")


class RerankRequest(PooledBody):
    """Body of /v1/rerank."""

    query: str | None = described("What is looked for.", examples=["What is a girih?"])
    documents: list[str | dict[str, Any]] | None = described(
        'Texts, or objects with the field "text".', examples=[["A pattern.", "A river."]]
    )
    top_n: Integer | None = described("Best results to return; 0 and null return all.", minimum=0)
    return_documents: bool | None = described("Put each document beside its score (default true).")
    max_tokens_per_doc: Integer | None = described("Same as truncate_prompt_tokens.", minimum=1)
