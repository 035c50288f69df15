"""Verbs of the command line, one module each.

A module has `run(words, options) -> int`; it is imported only when its verb is used.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast


@dataclass(frozen=True)
class Options:
    """Flags that every verb takes.

    Attributes:
        quiet: no progress on stderr.
        debug: show tracebacks.
    """

    quiet: bool = False
    debug: bool = False


class VerbModule(Protocol):
    """The interface of a verb's module."""

    def run(self, words: list[str], options: Options) -> int:
        """Do the verb's work with its `key=value` words; returns the exit code."""


@dataclass(frozen=True)
class Verb:
    """One entry of the table below.

    Attributes:
        name: what the user types; a space in it separates two words.
        summary: one line for `girih --help`.
        examples: command lines for the verb's own help.
    """

    name: str
    summary: str
    examples: tuple[str, ...]

    def load(self) -> VerbModule:
        """Import the verb's module."""
        name = self.name.replace(" ", "_").replace("-", "_")
        return cast("VerbModule", importlib.import_module(f"girih.serve.cli.commands.{name}"))


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "fetch",
            "get a model's files into the local cache",
            ("girih fetch model=smollm2", "girih fetch model=gemma3_270m"),
        ),
        Verb(
            "models",
            "the models that are built in or on this machine, with sizes",
            ("girih models",),
        ),
        Verb(
            "models rm",
            "remove a model's files from this machine",
            ("girih models rm smollm2", "girih models rm org/name"),
        ),
        Verb(
            "generate",
            "complete a prompt; only the text goes to stdout",
            (
                'girih generate prompt="The capital of France is" max_tokens=16',
                'girih generate model=DIR chat=true prompt="Write a haiku" temperature=0.7 seed=1',
                "echo Hello | girih generate prompt=- opt=O0",
            ),
        ),
        Verb(
            "chat",
            "talk with a model in the terminal",
            (
                "girih chat model=smollm2",
                'girih chat url=http://127.0.0.1:8000 system="Answer in one sentence."',
            ),
        ),
        Verb(
            "compile",
            "compile a model into a bundle that starts without a compiler",
            ("girih compile model=smollm2 bundle=DIR", "girih compile model=DIR dtype=float32"),
        ),
        Verb(
            "serve",
            "answer OpenAI-compatible HTTP requests",
            (
                "girih serve model=smollm2 port=8000",
                "girih serve model=DIR bundle=DIR 'serve.api_keys=[KEY]' host=0.0.0.0",
            ),
        ),
        Verb(
            "run-batch",
            "answer a file of requests in OpenAI's batch format",
            (
                "girih run-batch model=smollm2 input=requests.jsonl output=answers.jsonl",
                "girih run-batch url=http://127.0.0.1:8000 input=FILE output=FILE concurrency=16",
            ),
        ),
        Verb(
            "bench offline",
            "measure an engine in this process on fixed workloads",
            (
                "girih bench offline model=DIR workload_file=FILE",
                "girih bench offline model=DIR workload_file=FILE 'workloads=[single,batch8]'",
            ),
        ),
        Verb(
            "bench scheduler",
            "measure what a step costs in the scheduler, without a model",
            ("girih bench scheduler", "girih bench scheduler steps=500"),
        ),
        Verb(
            "bench serve",
            "measure any OpenAI-compatible server under a timed load",
            (
                "girih bench serve request_rate=4 num_requests=200",
                "girih bench serve base_url=URL api=chat dataset=sharegpt dataset.file=FILE",
                "girih bench serve max_concurrency=8 slo.ttft_ms=300 report.plots=DIR",
            ),
        ),
        Verb(
            "simulate",
            "the scheduler under a load on a clock of its own, with measured step costs",
            (
                "girih simulate cost=FILE request_rate=4 num_requests=10000 slo.ttft_ms=500",
                "girih simulate cost=FILE replicas=4 dataset=trace dataset.file=FILE",
            ),
        ),
        Verb(
            "simulate fit",
            "what a step costs, from the trace of an engine that ran under load",
            ("girih simulate fit trace=TRACE records=RECORDS out=FILE",),
        ),
        Verb(
            "explain",
            "show the stages: program map, tiles, passes, key",
            ("girih explain model=smollm2 opt=O2", "girih explain explain.html=page.html"),
        ),
        Verb(
            "check",
            "compare the compiled program with transformers on random weights",
            ("girih check model=smollm2 check.layers=4", "girih check model=DIR opt=O0"),
        ),
        Verb(
            "passes list",
            "the compiler passes in order, and the levels that run them",
            ("girih passes list opt=O1",),
        ),
        Verb(
            "passes run",
            "lower a model or a dumped graph and print what each pass did",
            (
                "girih passes run model=smollm2 opt.dump=DIR opt.verify=true",
                "girih passes run graph=DIR/001_canonicalize.json opt.stop_after=gather_last_rows",
            ),
        ),
        Verb(
            "passes diff",
            "what differs between two dumped graphs, or between two levels",
            (
                "girih passes diff before=DIR/000_traced.json after=DIR/001_canonicalize.json",
                "girih passes diff model=DIR before=O1 after=O2",
            ),
        ),
        Verb(
            "passes bisect",
            "find the pass after which a check fails",
            (
                "girih passes bisect model=DIR",
                "girih passes bisect check='girih generate {opt} prompt=Hi | grep -q Hello'",
            ),
        ),
        Verb(
            "sweep",
            "measure every combination of settings: table, rows and Pareto plot",
            (
                "girih sweep opt=O0,O1,O2,O3 workloads=single,batch8 out=DIR",
                "girih sweep 'opt=glob(O*)' model=DIR rounds=1",
            ),
        ),
        Verb(
            "cache list",
            "the cached bundles: sizes, ages, keys",
            ("girih cache list",),
        ),
        Verb(
            "cache explain",
            "whether a model's bundle is cached, and what made a miss",
            ("girih cache explain model=smollm2 opt=O1", "girih cache explain target.isa=avx512"),
        ),
        Verb(
            "cache prune",
            "remove the bundles used longest ago",
            ("girih cache prune", "girih cache prune max_gib=2"),
        ),
        Verb(
            "cache verify",
            "hold every cached bundle against its checksums",
            ("girih cache verify",),
        ),
        Verb(
            "env",
            "report versions, machine, cache and models, to paste into a bug report",
            ("girih env", "girih env json=true"),
        ),
        Verb(
            "completion",
            "print a script that completes words in bash, zsh or fish",
            (
                'eval "$(girih completion bash)"    # in ~/.bashrc',
                'eval "$(girih completion zsh)"     # in ~/.zshrc, after compinit',
                "girih completion fish > ~/.config/fish/completions/girih.fish",
            ),
        ),
    )
}
