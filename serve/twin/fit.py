"""From the trace of a measured engine to the cost of its steps.

    runtime.trace=FILE ─▶ read_trace ─▶ MeasuredSteps ─▶ fit_rates ─▶ StepCost
    report.records=FILE (the same run, seen by its clients) ─▶ front

Terms are fitted by least squares of the relative error, none of them negative.
"""

from __future__ import annotations

import json
import operator
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from girih.kernels.base.errors import ConfigError
from girih.runtime.observe.step_fit import fit_rates
from girih.runtime.schedule.step_shape import StepShape
from girih.serve.bench.metrics import percentile
from girih.serve.twin.cost import TERMS, FitError, MeasuredEngine, StepCost, terms_of

MIN_STEPS = 50
IDLE_SECONDS = 0.02  # a longer pause between two steps had nothing to do
SKIPPED_STEPS = 5  # of a start: memory is touched for the first time


@dataclass
class MeasuredSteps:
    """The steps of a trace.

    Attributes:
        engine: the engine.
        shapes: of each step, in order.
        started: when the runner took each up, in seconds on the engine's clock.
        ended: when it was done.
        first_token: seconds from arrival to the first token, per request in order of arrival.
    """

    engine: MeasuredEngine
    shapes: list[StepShape] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


def read_trace(file: str) -> MeasuredSteps:
    """Read a file that `runtime.trace` wrote.

    Raises:
        ConfigError: it cannot be read, or is no such trace.
    """
    try:
        text = Path(file).read_text("utf-8")
        events = json.loads(text.rstrip().rstrip(",") + "]")
        return _collect(events)
    except OSError as error:
        raise ConfigError(f"trace {file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"trace {file} is no file that `runtime.trace` of this version wrote "
            f"({type(error).__name__}: {error})"
        ) from error


def _collect(events: list[dict[str, Any]]) -> MeasuredSteps:
    steps = MeasuredSteps(msgspec.convert(events[0]["args"], MeasuredEngine))
    spans: dict[int, list[tuple[float, float]]] = {}
    shapes: dict[int, StepShape] = {}
    arrived: dict[str, float] = {}
    answered: dict[str, float] = {}
    for event in events[1:]:
        notes = event["args"]
        if event["name"] == "arrive":
            arrived[notes["request"]] = event["ts"] / 1e6
        elif event["name"] == "update":
            moment = (event["ts"] + event["dur"]) / 1e6
            answered.update(dict.fromkeys(notes["first_tokens"], moment))
        elif event["name"] in ("prepare", "run", "sample"):
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            spans.setdefault(notes["step"], []).append(span)
            shapes[notes["step"]] = StepShape(
                **{name: notes[name] for name in StepShape.__struct_fields__}
            )
    for step in sorted(spans):
        steps.shapes.append(shapes[step])
        steps.started.append(min(start for start, _ in spans[step]))
        steps.ended.append(max(end for _, end in spans[step]))
    steps.first_token = [answered[i] - arrived[i] for i in arrived if i in answered]
    return steps


def fit_cost(steps: MeasuredSteps, records: str | None = None) -> StepCost:
    """Fit a cost to measured steps.

    Args:
        steps: what was measured.
        records: file of `report.records` of the one measurement the trace saw.

    Raises:
        ConfigError: there are too few steps, or the records are of other requests.
    """
    num_steps = len(steps.shapes) - SKIPPED_STEPS
    if num_steps < MIN_STEPS:
        raise ConfigError(
            f"the trace has {len(steps.shapes)} steps; at least {MIN_STEPS + SKIPPED_STEPS} are "
            "needed: measure longer"
        )
    shapes = steps.shapes[SKIPPED_STEPS:]
    spans = zip(steps.started, steps.ended, strict=True)
    measured = [end - start for start, end in spans][SKIPPED_STEPS:]
    quantities = [terms_of(shape) for shape in shapes]
    rates = fit_rates(quantities, measured)
    predicted = [sum(map(operator.mul, amounts, rates)) for amounts in quantities]
    return StepCost(
        terms=dict(zip(TERMS, rates, strict=True)),
        gap=_gap(steps),
        front=_front(steps, records) if records else 0.0,
        engine=steps.engine,
        error=_fit_error(predicted, measured),
    )


def _fit_error(predicted: list[float], measured: list[float]) -> FitError:
    pairs = zip(predicted, measured, strict=True)
    errors = sorted(abs(cost / seconds - 1) for cost, seconds in pairs)
    return FitError(
        steps=len(measured),
        seconds=sum(measured),
        median=percentile(errors, 50),
        p90=percentile(errors, 90),
        total=sum(predicted) / sum(measured) - 1,
    )


def _gap(steps: MeasuredSteps) -> float:
    """Median pause between steps that had work to do."""
    pauses = [start - end for end, start in zip(steps.ended, steps.started[1:], strict=False)]
    return max(0.0, statistics.median([p for p in pauses if p < IDLE_SECONDS] or [0.0]))


def _front(steps: MeasuredSteps, records: str) -> float:
    """Median of what clients waited longer for the first token than the core says."""
    try:
        lines = [json.loads(line) for line in Path(records).read_text("utf-8").splitlines()]
        lines.sort(key=lambda line: line["sent"])
        seen = [line["ttft_ms"] / 1000 for line in lines if line["ttft_ms"] is not None]
    except OSError as error:
        raise ConfigError(f"records {records} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"records {records} is no file of `report.records`: {error}") from error
    if len(seen) != len(steps.first_token):
        raise ConfigError(
            f"records {records} has {len(seen)} answers and the trace {len(steps.first_token)}: "
            "they must be of one run, without warm-up requests (load.warmups=0)"
        )
    pairs = zip(seen, steps.first_token, strict=True)
    waits: list[float] = [outside - inside for outside, inside in pairs]
    return max(0.0, statistics.median(waits))
