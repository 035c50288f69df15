"""The settings of every verb: sections, each a record, and keys of its own.

The records live where they are used (`runtime/records/config.py`, `passes/options.py`,
`serve/config.py`); what Hydra composes is checked against them by `kernels/base/records.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any

from girih.conf.tool_keys import (
    CachePruneKeys,
    ModelsRmKeys,
    PassesBisectKeys,
    PassesDiffKeys,
    PassesRunKeys,
    SweepKeys,
)
from girih.kernels.base.choices import choices_of
from girih.passes.options import OptConfig
from girih.runtime.records.config import (
    CacheConfig,
    CompileConfig,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    TargetConfig,
)
from girih.serve.bench.config import (
    DatasetConfig,
    EndpointConfig,
    LoadConfig,
    ReportConfig,
    SloConfig,
)
from girih.serve.config import BenchConfig, CheckConfig, ExplainConfig, SamplingConfig, ServeConfig
from girih.serve.twin.config import SimulateConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "target": TargetConfig,
    "opt": OptConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "runtime": RuntimeConfig,
    "compile": CompileConfig,
    "sampling": SamplingConfig,
    "serve": ServeConfig,
    "bench": BenchConfig,
    "explain": ExplainConfig,
    "check": CheckConfig,
    "dataset": DatasetConfig,
    "endpoint": EndpointConfig,
    "load": LoadConfig,
    "slo": SloConfig,
    "report": ReportConfig,
    "simulate": SimulateConfig,
}
"""Every section of a configuration and the record it fills."""

PLAIN_SECTIONS = (
    "compile", "explain", "check", "endpoint", "load", "slo", "report", "simulate",
)  # fmt: skip
GROUPS = tuple(name for name in SECTIONS if name not in PLAIN_SECTIONS)
"""Sections that are also Hydra groups with named options."""

ENGINE_SECTIONS = ("model", "target", "opt", "scheduler", "cache", "runtime", "compile")


@dataclasses.dataclass
class GenerateKeys:
    """Top-level keys of `girih generate`.

    Attributes:
        prompt: the text to continue; "-" reads it from stdin.
        prompts: several texts, printed one after the other.
        chat: true wraps each text as a user message in the model's chat template.
    """

    prompt: str | None = None
    prompts: tuple[str, ...] = ()
    chat: bool = False


@dataclasses.dataclass
class ChatKeys:
    """Top-level keys of `girih chat`.

    Attributes:
        url: an OpenAI-compatible server that answers instead of an engine in this process.
        url_model: the model's name there; null asks the server.
        api_key: shown to the server; null takes $OPENAI_API_KEY when it is set.
        system: the system message.
        load: a saved conversation to go on with.
    """

    url: str | None = None
    url_model: str | None = None
    api_key: str | None = None
    system: str | None = None
    load: str | None = None


@dataclasses.dataclass
class RunBatchKeys:
    """Top-level keys of `girih run-batch`.

    Attributes:
        input: JSON lines with custom_id, url and body, as OpenAI's batch API takes them.
        output: where answers go, in the order of the input; a file that is there is gone on with.
        concurrency: lines under way together.
        url: a server that answers instead of an engine in this process.
        api_key: shown to that server; null takes $OPENAI_API_KEY when it is set.
    """

    input: str | None = None
    output: str | None = None
    concurrency: int = 64
    url: str | None = None
    api_key: str | None = None


@dataclasses.dataclass
class EnvKeys:
    """Top-level keys of `girih env`.

    Attributes:
        json: print the report as JSON.
    """

    json: bool = False


@dataclasses.dataclass
class SchedulerBenchKeys:
    """Top-level keys of `girih bench scheduler`.

    Attributes:
        steps: steps that are measured per case.
    """

    steps: int = 200


@dataclasses.dataclass
class SimulateFitKeys:
    """Top-level keys of `girih simulate fit`.

    Attributes:
        trace: what `girih serve runtime.trace=FILE` wrote while it was measured.
        records: what `girih bench serve report.records=FILE load.warmups=0` wrote of that run; null
            leaves out the way between clients and the core.
        out: where the cost is written, for `girih simulate simulate.cost=FILE`.
    """

    trace: str | None = None
    records: str | None = None
    out: str | None = None


@dataclasses.dataclass
class NoKeys:
    """A verb without top-level keys of its own."""


@dataclasses.dataclass(frozen=True)
class VerbSchema:
    """The settings of a verb: its sections and its own top-level keys."""

    sections: tuple[str, ...]
    keys: type = NoKeys

    @property
    def positional(self) -> str | None:
        """The key whose value may stand alone: the model, or a verb's only key."""
        keys = [field.name for field in dataclasses.fields(self.keys)]
        only = keys[0] if len(keys) == 1 and not self.sections else None
        return "model" if "model" in self.sections else only


VERBS: dict[str, VerbSchema] = {
    "fetch": VerbSchema(("model",)),
    "models": VerbSchema(()),
    "models rm": VerbSchema((), ModelsRmKeys),
    "generate": VerbSchema((*ENGINE_SECTIONS, "sampling"), GenerateKeys),
    "chat": VerbSchema((*ENGINE_SECTIONS, "sampling"), ChatKeys),
    "run-batch": VerbSchema((*ENGINE_SECTIONS, "sampling"), RunBatchKeys),
    "compile": VerbSchema(ENGINE_SECTIONS),
    "serve": VerbSchema((*ENGINE_SECTIONS, "sampling", "serve")),
    "bench offline": VerbSchema((*ENGINE_SECTIONS, "bench")),
    "bench scheduler": VerbSchema((), SchedulerBenchKeys),
    "bench serve": VerbSchema(("endpoint", "dataset", "load", "slo", "report")),
    "simulate": VerbSchema(("simulate", "scheduler", "cache", "dataset", "load", "slo", "report")),
    "simulate fit": VerbSchema((), SimulateFitKeys),
    "explain": VerbSchema((*ENGINE_SECTIONS, "explain")),
    "check": VerbSchema((*ENGINE_SECTIONS, "check")),
    "env": VerbSchema((), EnvKeys),
    "completion": VerbSchema(()),
    "passes list": VerbSchema(("opt",)),
    "passes run": VerbSchema(ENGINE_SECTIONS, PassesRunKeys),
    "passes diff": VerbSchema(ENGINE_SECTIONS, PassesDiffKeys),
    "passes bisect": VerbSchema(ENGINE_SECTIONS, PassesBisectKeys),
    "sweep": VerbSchema((*ENGINE_SECTIONS, "bench"), SweepKeys),
    "cache list": VerbSchema(()),
    "cache explain": VerbSchema(ENGINE_SECTIONS),
    "cache prune": VerbSchema((), CachePruneKeys),
    "cache verify": VerbSchema(()),
}

ALIASES: dict[str, str] = {
    "bundle": "compile.bundle",
    "bundle_missing": "compile.bundle_missing",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "threads": "target.threads",
    "max_num_seqs": "scheduler.max_num_seqs",
    "num_blocks": "cache.num_blocks",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "seed": "sampling.seed",
    "stop": "sampling.stop",
    "ignore_eos": "sampling.ignore_eos",
    "host": "serve.host",
    "port": "serve.port",
    "workload_file": "bench.workload_file",
    "workloads": "bench.workloads",
    "rounds": "bench.rounds",
    "cost": "simulate.cost",
    "replicas": "simulate.replicas",
    "base_url": "endpoint.base_url",
    "api": "endpoint.api",
    "model": "endpoint.model",
    "num_requests": "dataset.num_requests",
    "input_len": "dataset.input_len",
    "output_len": "dataset.output_len",
    "request_rate": "load.request_rate",
    "burstiness": "load.burstiness",
    "max_concurrency": "load.max_concurrency",
}
"""Short names on the command line and in `LLM(...)`."""


LABELS: dict[str, str] = {"opt.level": "opt"}
"""Names that a chosen option carries: nothing hangs on them, so that the option is what is set."""


def root_name(verb: str) -> str:
    """Return the name of a verb's YAML file, without its ending."""
    return verb.replace(" ", "_").replace("-", "_")


@cache
def root_schema(verb: str) -> type:
    """Return the dataclass that types the whole configuration of `verb`."""
    schema = VERBS[verb]
    fields: list[tuple[str, Any, Any]] = [
        (name, SECTIONS[name], dataclasses.field(default_factory=SECTIONS[name]))
        for name in schema.sections
    ]
    return dataclasses.make_dataclass(
        f"{root_name(verb).title()}Root", fields, bases=(schema.keys,), kw_only=True
    )


def leaf_types(verb: str) -> dict[str, Any]:
    """Return every dotted key that `verb` accepts with its type."""
    leaves: dict[str, Any] = {}
    _collect(root_schema(verb), "", leaves)
    return {key: kind for key, kind in leaves.items() if key not in LABELS}


def choices(verb: str) -> dict[str, tuple[str, ...]]:
    """Return the dotted keys of `verb` that take one of a few values, and these."""
    return {
        f"{section}.{name}": allowed
        for section in VERBS[verb].sections
        for name, allowed in choices_of(SECTIONS[section]).items()
    }


def key_names(verb: str) -> list[str]:
    """Return every name that a setting of `verb` has, the short ones first."""
    leaves = leaf_types(verb)
    own = [key for key in leaves if "." not in key]
    groups = [name for name in VERBS[verb].sections if name in GROUPS]
    aliases = [name for name, key in ALIASES.items() if key in leaves]
    return list(dict.fromkeys([*own, *groups, *aliases, *leaves]))


def _collect(record: type, prefix: str, leaves: dict[str, Any]) -> None:
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            _collect(typing.cast(type, kind), f"{prefix}{field.name}.", leaves)
        else:
            leaves[prefix + field.name] = kind


def describe(record: type) -> dict[str, str]:
    """Return the one-line description of each attribute, read from the class docstring."""
    notes: dict[str, str] = {}
    _, _, body = (record.__doc__ or "").partition("Attributes:")
    current = ""
    for line in body.splitlines():
        name, colon, rest = line.strip().partition(":")
        if colon and name.isidentifier() and len(line) - len(line.lstrip()) <= 8:
            current = name
            notes[current] = rest.strip()
        elif current and line.strip():
            notes[current] += " " + line.strip()
    return notes
