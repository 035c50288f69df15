"""`girih bench scheduler`: what a step costs in the scheduler, without any model."""

from __future__ import annotations

from girih.conf.compose import compose_config
from girih.serve.bench.scheduler import measure_scheduler
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Print one line per case."""
    config = compose_config("bench scheduler", words)
    print("case    running  schedule us  update us  us per request")
    for cost in measure_scheduler(config["steps"]):
        each = cost.total_us / cost.num_running
        print(
            f"{cost.case:<7} {cost.num_running:>7}  {cost.schedule_us:>11.1f}  "
            f"{cost.update_us:>9.1f}  {each:>14.2f}",
            flush=True,
        )
    return 0
