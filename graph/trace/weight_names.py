"""A plan for a checkpoint that names its tensors otherwise than the one it was made with.

A bundle is found by the configuration alone, so a fine-tune of the same model finds its base's. It
may be saved without the base model's prefix, or by another version of transformers, with experts
stacked or apart. transformers loads all of these; its rules say here which tensors are meant.
"""

from __future__ import annotations

from dataclasses import replace

from girih.graph.files.spec import ModelSpec
from girih.graph.ir.weight_plan import CONSTANT, Source, WeightPlan
from girih.graph.trace.trace import build_on_meta, tensor_sources
from girih.graph.weights.checkpoint import Checkpoint
from girih.graph.weights.conversions import model_names


def plan_for_checkpoint(plan: WeightPlan, checkpoint: Checkpoint, spec: ModelSpec) -> WeightPlan:
    """The plan with its sources as `checkpoint` names them.

    A plan whose names are all there is returned as it is, without importing transformers' models.
    What the checkpoint does not hold under any name stays, and loading it says so.

    Args:
        plan: of a bundle.
        checkpoint: the weights of `spec`.
        spec: the model that is started.

    Raises:
        TraceError: transformers cannot build the model, or convert the checkpoint's tensors.
    """
    if all(name in checkpoint for name in plan.checkpoint_names()):
        return plan
    model = build_on_meta(spec)
    meant = model_names(model, plan.checkpoint_names())
    found = tensor_sources(model, spec)
    for name, kept in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if kept in found:
            found.setdefault(name, found[kept])

    def here(source: Source) -> Source:
        own = source.name if not isinstance(source, str) else meant.get(source, (source,))[0]
        return found.get(own, source)

    return WeightPlan(
        [
            e if e.form == CONSTANT else replace(e, sources=tuple(map(here, e.sources)))
            for e in plan.entries.values()
        ]
    )
