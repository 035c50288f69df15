"""`girih simulate fit`: what a step costs, from the trace of an engine that ran."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.serve.cli.preflight import require_writable
from girih.serve.cli.verbs import Options
from girih.serve.twin.cost import StepCost
from girih.serve.twin.fit import fit_cost, read_trace


def run(words: list[str], options: Options) -> int:
    """Fit, print the terms and how well they fit, write the file."""
    config = compose_config("simulate fit", words)
    if config["trace"] is None:
        raise ConfigError("trace=FILE is needed: what `girih serve runtime.trace=FILE` wrote")
    require_writable("out", config["out"])
    cost = fit_cost(read_trace(config["trace"]), config["records"])
    print(_as_table(cost))
    if config["out"] is not None:
        cost.save(config["out"])
    return 0


def _as_table(cost: StepCost) -> str:
    error = cost.error
    lines = [f"{name:<18}{rate * 1e6:>12.3f} us" for name, rate in cost.terms.items()]
    lines += [
        f"{'gap':<18}{cost.gap * 1e6:>12.3f} us   between steps",
        f"{'front':<18}{cost.front * 1e6:>12.3f} us   from the client to the core and back",
        f"{error.steps} steps, {error.seconds:.1f} s: off by {error.median:.1%} (median), "
        f"{error.p90:.1%} (p90), {error.total:+.1%} (all together)",
    ]
    return "\n".join(lines)
