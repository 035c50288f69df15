"""Parameters of a request for a vector (no torch; crosses process borders)."""

from __future__ import annotations

import msgspec


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that finish the vector of one text.

    Attributes:
        dimensions: cut an embedding to its first values; None keeps all.
        use_activation: bring it to length 1, or make probabilities of label values; None does as
            the model's files say.
        token_types: which text of a pair each token of the prompt is of; None for a single text.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    token_types: list[int] | None = None


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model that embeds or classifies, for front ends.

    Attributes:
        mode: "last", "cls", "mean" or "all".
        width: values per vector.
        activation: what finishes it by default: "normalize", "softmax", "sigmoid" or "identity".
        has_token_types: pairs come with token types.
        can_cut: embeddings may be cut to fewer dimensions.
        dimensions: the lengths allowed then; () allows any.
        labels: names of a classifier's values, in order.
    """

    mode: str
    width: int
    activation: str
    has_token_types: bool = False
    can_cut: bool = False
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
