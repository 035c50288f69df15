"""Runs engines in a process of its own: `python support_scenarios.py < job.json > answer.json`.

A process loads one kernel library for good, so tests with compiled code do not share one with the
tests of other folders. A job is a list of scenarios; each builds an engine and runs rounds:

    {"name", "model", "level", "options": {of LLM}, "rounds": [[prompt, ...], ...]}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_TOKENS = 24


def run_scenarios(scenarios: list[dict[str, Any]], **environment: str) -> dict[str, Any]:
    """Run scenarios in another process; answers by scenario name, and "process" about itself."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(scenarios),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def main() -> None:
    """Serve one job."""
    answer_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("girih").addHandler(handler)
    answers = {scenario["name"]: _run(scenario) for scenario in json.load(sys.stdin)}
    models = [m for m in sys.modules if m.startswith("transformers.models.llama.modeling")]
    answers["process"] = {"warnings": records, "modeling": models}
    json.dump(answers, answer_file)
    answer_file.close()


def _run(scenario: dict[str, Any]) -> dict[str, Any]:
    from support_core import engine_of

    from girih import LLM, SamplingParams
    from girih.conf.files import load_opt_level
    from girih.graph.tiles.count import COMPILES

    opt = load_opt_level(scenario.get("level", "O2"))
    opt.verify = True
    llm = LLM(scenario["model"], opt=opt, **scenario.get("options", {}))
    engine = engine_of(llm)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    rounds = []
    executable = engine.core.runner.executable
    while executable.before_step is not None:  # compiled code is still being taken in
        rounds += [llm.generate(prompts, greedy) for prompts in scenario["rounds"]]
    compiled_before = COMPILES.total
    with COMPILES.forbidden(), _no_processes():
        rounds += [llm.generate(prompts, greedy) for prompts in scenario["rounds"]]
    engine.core.check_integrity()
    stats = engine.core.stats()
    return {
        "bundle": engine.report.bundle.as_text(),
        "key": engine.facts.key,
        "tokens": [[list(o.outputs[0].token_ids) for o in outputs] for outputs in rounds],
        "cached": [[o.num_cached_tokens for o in outputs] for outputs in rounds],
        "preemptions": stats.num_preemptions,
        "steps": stats.num_steps,
        "attention": engine.report.attention,
        "verified": [result.as_text() for result in engine.report.verified],
        "compiled_while_serving": COMPILES.total - compiled_before,
    }


@contextlib.contextmanager
def _no_processes() -> Iterator[None]:
    """Serving starts no program, so no compiler either."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a process was started while serving: {args}")

    right = subprocess.Popen.__init__
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = right  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
