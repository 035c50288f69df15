"""Checks the tensors of a checkpoint that the program does not read.

Heads that a task does not need, vision towers, extra prediction layers: all of that may lie unused.
A bias or a scale of a module that does run may not, nor may an output head of its own where the
configuration says it is the embedding: the model would be another one, and nothing would say so.
"""

from __future__ import annotations

import logging

import torch

from girih.graph.files.spec import ModelSpec
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.weights.checkpoint import Checkpoint
from girih.kernels.base.errors import WeightError

log = logging.getLogger("girih.weights")

# Output heads, which a configuration can tie to the embedding.
_HEADS = ("lm_head.weight", "embed_out.weight")
# Buffers that older versions of transformers saved and that the model computes itself.
_COMPUTED = ("inv_freq", "position_ids", "masked_bias", "causal_mask", "attn.bias")
_SHOWN = 3


def check_unused(plan: WeightPlan, checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """The tensors of a checkpoint that nothing reads; logs a line about them.

    Args:
        plan: of the program, with the names of this checkpoint.
        checkpoint: its weights; two heads are read and compared, of all others only names.
        spec: the model, for messages.

    Raises:
        WeightError: one of them is part of what runs; names it and what to do.
    """
    used = plan.checkpoint_names()
    modules = {name.rpartition(".")[0]: name for name in used}
    left = sorted(set(checkpoint.names()) - set(used))
    for name in left:
        module, _, leaf = name.rpartition(".")
        if module in modules and _is_part(leaf):
            raise WeightError(
                f"the checkpoint of {spec.name} holds {name}, but {spec.architecture} as "
                f"configured reads only {modules[module]} of that module: what it computes would "
                f"be wrong. {_advice(leaf)}"
            )
        if spec.task == "generate" and name.endswith(_HEADS):
            _require_tied(name, used, checkpoint, spec)
    unknown = [name for name in left if not name.endswith((*_COMPUTED, *_HEADS))]
    if unknown:
        more = ", …" if len(unknown) > _SHOWN else ""
        log.warning(
            "%d of %d tensors of %s are not read: %s%s",
            len(unknown), len(checkpoint.names()), spec.name, ", ".join(unknown[:_SHOWN]), more,
        )  # fmt: skip
    return left


def _is_part(leaf: str) -> bool:
    """Return whether a tensor of that name changes what its module computes."""
    return leaf == "bias" or "scale" in leaf or leaf in ("qzeros", "g_idx", "weight_zero_point")


def _advice(leaf: str) -> str:
    if leaf == "bias":
        return "Its config.json should say so (attention_bias, mlp_bias or the like: true)"
    return "Quantised weights are not read: use a bfloat16, float16, float32 or GGUF copy"


def _require_tied(head: str, used: list[str], checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """The head must be the embedding that is read in its place."""
    shape = checkpoint.shape(head)
    tables = [name for name in used if checkpoint.shape(name) == shape]
    for name in tables:
        if torch.equal(checkpoint.read(head), checkpoint.read(name)):
            return
    raise WeightError(
        f"the checkpoint of {spec.name} holds an output head of its own, {head}, but its "
        f"configuration ties the head to {' or '.join(tables) or 'the embedding'}, which has other "
        'values; write "tie_word_embeddings": false into config.json to use it'
    )
