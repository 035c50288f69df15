"""`girih passes bisect`: find the pass after which a check fails."""

from __future__ import annotations

import subprocess
import sys

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError, PassError
from girih.runtime.records.config import EngineConfig
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.progress import ProgressDisplay

PLACE = "{opt}"


def run(words: list[str], options: Options) -> int:
    """Name the pass at fault. Without `check=` the check is `opt.verify`."""
    config = compose_config("passes bisect", words)
    engine, check = engine_of(config), config["check"]
    if check is None:
        return _by_verify(engine, options)
    if PLACE not in check:
        raise ConfigError(
            f"check='{check}' does not say where the pass switches go; put {PLACE} in it, e.g. "
            f"check='girih generate {PLACE} prompt=Hi | grep -q expected'"
        )
    from girih.passes.verify.bisect import first_bad_pass

    print(first_bad_pass(engine.opt.runs(), _Command(engine, check)))
    return 0


def _by_verify(engine: EngineConfig, options: Options) -> int:
    """Passes are verified one by one, so one lowering tells."""
    from girih.runtime.inspect import compiler_tools

    engine.opt.verify = True
    with ProgressDisplay(options.quiet) as progress:
        try:
            lowered = compiler_tools.lower_source(engine, None, progress)
        except PassError as error:
            print(error)
            return 1
    print(
        lowered.report() + "every pass is verified; check='COMMAND {opt}' bisects another symptom"
    )
    return 0


class _Command:
    """A shell command as a check: exit status 0 is good."""

    def __init__(self, engine: EngineConfig, check: str) -> None:
        self._level, self._all, self._check = engine.opt.level, engine.opt.runs(), check

    def __call__(self, first: tuple[str, ...]) -> bool:
        off = [f"opt.passes.{name}=false" for name in self._all[len(first) :]]
        command = self._check.replace(PLACE, " ".join([f"opt={self._level}", *off]))
        done = subprocess.run(command, shell=True, stdout=subprocess.DEVNULL, check=False)
        verdict = "good" if done.returncode == 0 else f"bad ({done.returncode})"
        print(f"{verdict}: {len(first)} passes, {command}", file=sys.stderr)
        return done.returncode == 0
