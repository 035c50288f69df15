"""Models that return vectors instead of logits, as functions of one packed step.

    hidden [T, H] ─▶ (running mean) ─▶ rows of `logits_index` [S, H] ─▶ (head) [S, labels]

Rows are selected before the head: every class of transformers that classifies runs its head on the
hidden state of one token per text, so its own code is given S texts of one token each. A mean over
a text is a recurrence (`girih::running_mean`), whose last row is the mean of all tokens; it needs
no more than that a text's tokens come in order, in one step or in several.
"""

from __future__ import annotations

from typing import Any

import torch

from girih.kernels.base.errors import TraceError


class RowSelection:
    """Gives the head of a classifier one hidden state per text while the model is traced.

    Args:
        model: a classifier of transformers.
        pools_mean: select of the running mean.
    """

    def __init__(self, model: torch.nn.Module, pools_mean: bool) -> None:
        self._pools_mean = pools_mean
        self._index: torch.Tensor | None = None
        base = getattr(model, model.base_model_prefix, None)  # type: ignore[arg-type]
        if not isinstance(base, torch.nn.Module):
            raise TraceError(f"{type(model).__name__} has no base model below its head")
        self.base = base
        self.score = getattr(model, "score", None)
        if self.score is None:  # the head's own code is run
            base.register_forward_hook(self._after_base)
            if isinstance(getattr(base, "pooler", None), torch.nn.Module):
                base.pooler.register_forward_pre_hook(self._before_pooler)  # type: ignore[union-attr]

    def run(self, model: torch.nn.Module, options: dict[str, Any], index: torch.Tensor) -> Any:
        """Logits [S, labels] of the rows in `index`."""
        self._index = index
        if self.score is not None:  # decoders: a linear layer on the last token
            hidden = self.base(**options).last_hidden_state
            return self.score(self._rows(hidden))
        return model(**options).logits

    def _after_base(self, module: Any, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = self._as_texts(output.last_hidden_state)
        return output

    def _before_pooler(self, module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._as_texts(inputs[0]), *inputs[1:])

    def _as_texts(self, hidden: torch.Tensor) -> torch.Tensor:
        """S texts of one token each, [S, 1, H]."""
        if hidden.ndim != 3:
            raise TraceError(f"{type(self.base).__name__} pools hidden states in its own way")
        return self._rows(hidden)[:, None]

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._index is not None, "rows are selected only while the model runs"
        if self._pools_mean:
            return mean_rows(hidden, self._index).to(hidden.dtype)
        return last_rows(hidden, self._index)


def last_rows(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows [S, H] of hidden states [1, T, H]."""
    return hidden[0].index_select(0, index)


def mean_rows(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows [S, H] of the running mean of hidden states [1, T, H], in float32."""
    means: torch.Tensor = torch.ops.girih.running_mean(hidden[0].float())
    return means.index_select(0, index)
