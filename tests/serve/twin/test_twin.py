"""The capacity twin: the same plans as the real service makes, figures, fits, the command."""

import dataclasses
import itertools
import json
import random
import threading

import numpy as np
import pytest
from support_core import make_core, make_request
from support_fake_runner import FakeRunner
from support_serving import FakeEngine

from girih.kernels.base.errors import ConfigError
from girih.runtime.client.loop import CoreLoop
from girih.runtime.engine.core import EngineCore
from girih.runtime.engine.observers import CoreObserver
from girih.runtime.observe.step_fit import fit_rates
from girih.runtime.observe.step_trace import StepTracer
from girih.runtime.records.config import CacheConfig, SchedulerConfig
from girih.runtime.records.messages import AddRequests, EngineFacts
from girih.runtime.records.plans import ModelRunnerOutput
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.schedule.step_shape import StepShape, shape_of
from girih.serve.bench.config import DatasetConfig, LoadConfig, SloConfig
from girih.serve.bench.datasets import BenchRequest, make_requests
from girih.serve.bench.load import Measurement
from girih.serve.bench.metrics import describe, summarize
from girih.serve.cli import main as cli
from girih.serve.twin.config import SimulateConfig
from girih.serve.twin.cost import (
    TERMS,
    FitError,
    MeasuredEngine,
    StepClock,
    StepCost,
    load_cost,
    terms_of,
)
from girih.serve.twin.figures import Distribution
from girih.serve.twin.fit import fit_cost, read_trace
from girih.serve.twin.requests import due_requests, engine_request
from girih.serve.twin.simulation import Simulation, TwinSettings

RATES = (0.04, 6e-4, 1.6e-3, 2.3e-3, 2.2e-3, 1.9e-3, 1e-4, 1.3e-5, 1.2e-6)
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 30, 16, 256


def make_cost(gap=0.0, front=0.0, rates=RATES):
    return StepCost(
        dict(zip(TERMS, rates, strict=True)),
        gap,
        front,
        MeasuredEngine(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN),
        FitError(100, 1.0, 0.0, 0.0, 0.0),
    )


def make_simulation(load=None, slo=None, cost=None, on_end=lambda record: None, **simulate):
    cache = CacheConfig(block_size=BLOCK_SIZE)
    settings = TwinSettings(SimulateConfig(**simulate), LIMITS, cache, cost or make_cost())
    return Simulation(settings, load or LoadConfig(), slo or SloConfig(), on_end)


def traffic(num_requests=60, seed=3):
    """Requests at random times: short and long, some with a common beginning."""
    draw = random.Random(seed)
    shared, now = [draw.randrange(1000) for _ in range(48)], 0.0
    requests = []
    for index in range(num_requests):
        now += draw.expovariate(20.0)
        own = [draw.randrange(1000) for _ in range(draw.choice([3, 40, 130]))]
        prompt = shared * draw.randrange(2) + own
        requests.append((now, BenchRequest(index, prompt, draw.choice([1, 9, 80]))))
    return requests


# ---- the twin against the real service ----


class PlanWatcher(CoreObserver):
    """Keeps what was decided."""

    def __init__(self):
        self.plans = []

    def on_step(self, report):
        plan = report.plan
        new = [(r.request_id, r.num_computed_tokens, r.block_ids) for r in plan.new_requests]
        running = [(r.request_id, r.num_computed_tokens, r.new_block_ids) for r in plan.running]
        ended = (plan.finished_ids, plan.preempted_ids)
        self.plans.append((new, running, dict(plan.num_scheduled_tokens), *ended))


class GatedRunner:
    """Runs a plan when it is told to; tokens as the twin's."""

    def __init__(self):
        self.gate = threading.Semaphore(0)

    def execute(self, plan):
        assert self.gate.acquire(timeout=20)
        return ModelRunnerOutput(plan.step_id, {i: [0] for i in plan.num_scheduled_tokens})


class ClockedEndpoint:
    """Stands in for the socket: lets time pass on a fake clock and hands over what is due."""

    def __init__(self, requests, core, clock):
        self.clients = {}
        self.service = None
        self._requests = requests
        self._core = core
        self._clock = clock
        self._now = 0.0
        self._step_ends = None
        self._wakes = threading.Semaphore(0)

    def wake(self):
        self._wakes.release()

    def send(self, client, message):
        return True

    def broadcast(self, message):
        return []

    def receive(self, timeout):
        core = self._core
        if not core.is_async and not core._planned and self._ends_with(self._now):
            return self._take_due()
        if core._planned and self._step_ends is None:
            self._step_ends = self._now + self._clock.seconds(shape_of(core._planned[0]))
        due = self._requests[0][0] if self._requests else float("inf")
        if self._step_ends is not None and self._step_ends < due:
            self._end_step()
            return []
        if not self._requests:
            self.service.stop()
            return []
        self._now = due
        return self._take_due()

    def _ends_with(self, now):
        return bool(self._requests) and self._requests[0][0] <= now

    def _end_step(self):
        self._now, self._step_ends = self._step_ends, None
        self._core.runner.gate.release()
        while not self._core.has_result():
            assert self._wakes.acquire(timeout=20)

    def _take_due(self):
        taken = []
        while self._requests and self._requests[0][0] <= self._now:
            due, request = self._requests.pop(0)
            taken.append((b"client", AddRequests([engine_request(request, due)])))
        return taken


def real_plans(requests):
    """What the real service decides, its runner in a thread of its own."""
    scheduler = Scheduler(LIMITS, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), MAX_MODEL_LEN)
    core = EngineCore(scheduler, GatedRunner(), async_scheduling=True)
    endpoint = ClockedEndpoint(list(requests), core, StepClock(make_cost()))
    watcher = PlanWatcher()
    core.observers.append(watcher)
    facts = EngineFacts(name="", key="", model_path="", max_model_len=256, vocab_size=1000)
    endpoint.service = CoreLoop(FakeEngine(core, facts), endpoint)
    endpoint.service.announce()
    endpoint.service.run()
    core.close()
    return watcher.plans, core.stats()


def test_the_twin_decides_what_the_real_service_decides():
    requests = traffic()
    expected, stats = real_plans(requests)
    simulation = make_simulation()
    watcher = PlanWatcher()
    core = simulation.replicas[0].core
    core.observers.append(watcher)
    simulation.run(iter(requests), len(requests))
    assert stats.num_preemptions > 3 and stats.kv_cache.prefix_hits > 500
    assert len(expected) > 150
    for step, (ours, theirs) in enumerate(zip(watcher.plans, expected, strict=True)):
        assert ours == theirs, f"step {step}"
    assert core.stats().num_preemptions == stats.num_preemptions
    assert core.stats().kv_cache == stats.kv_cache
    core.check_integrity()


def test_without_planning_ahead_steps_take_what_came_during_the_step_before():
    requests = [(0.0, BenchRequest(0, [1] * 8, 4)), (0.01, BenchRequest(1, [2] * 8, 4))]
    simulation = make_simulation(async_scheduling=False)
    watcher = PlanWatcher()
    simulation.replicas[0].core.observers.append(watcher)
    simulation.run(iter(requests), 2)
    assert [sorted(scheduled) for _, _, scheduled, *_ in watcher.plans] == [
        ["0"],
        *[["0", "1"]] * 3,
        ["1"],
    ]


# ---- events ----


def test_times_of_one_request_are_the_sum_of_its_steps():
    cost = make_cost(gap=0.001, front=0.01)
    records = []
    simulation = make_simulation(cost=cost, on_end=records.append)
    simulation.run(iter([(1.0, BenchRequest(0, [5] * 20, 3))]), 1)
    clock = StepClock(cost)
    steps = [
        clock.seconds(StepShape(20, 1, 0, 210)),
        clock.seconds(StepShape(1, 1, 21, 0)),
        clock.seconds(StepShape(1, 1, 22, 0)),
    ]
    (record,) = records
    assert record.sent == 1.0
    assert record.ttft == pytest.approx(0.01 + steps[0])
    assert record.itl == pytest.approx([0.001 + steps[1], 0.001 + steps[2]])
    assert record.ended == pytest.approx(1.012 + sum(steps))
    assert (record.num_prompt_tokens, record.num_output_tokens) == (20, 3)


def test_a_concurrency_limit_holds_requests_back():
    requests = [(0.0, BenchRequest(i, [i] * 20, 5)) for i in range(6)]
    simulation = make_simulation(load=LoadConfig(max_concurrency=2))
    simulation.run(iter(requests), 6)
    summary = simulation.summary((90.0,))
    assert summary["completed"] == 6
    assert summary["peak_concurrency"] == 2
    assert summary["latency_ms"]["queue"]["max"] > 0


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
def test_replicas_share_the_load(routing):
    requests = [(0.01 * i, BenchRequest(i, [i] * 20, 5)) for i in range(40)]
    one = make_simulation(routing=routing)
    one.run(iter(requests), 40)
    four = make_simulation(routing=routing, replicas=4)
    four.run(iter(requests), 40)
    answered = [replica.core.stats().finished["length"] for replica in four.replicas]
    assert sum(answered) == 40 and min(answered) >= 8
    ttft = [s.summary(())["latency_ms"]["ttft"]["mean"] for s in (one, four)]
    assert ttft[1] < ttft[0] / 2


def test_a_request_goes_where_fewest_are_unfinished():
    long, short = [3] * 40, [4] * 8
    requests = [(0.0, BenchRequest(0, long, 200)), (0.001, BenchRequest(1, short, 1))]
    requests += [(1.0 + i, BenchRequest(2 + i, short, 1)) for i in range(4)]
    simulation = make_simulation(replicas=2)
    simulation.run(iter(requests), len(requests))
    answered = [replica.core.stats().num_prompt_tokens for replica in simulation.replicas]
    assert answered == [40, 5 * 8]


def test_refused_requests_are_counted_with_their_reason():
    requests = [(0.0, BenchRequest(0, [1] * 400, 4)), (0.0, BenchRequest(1, [1] * 4, 4))]
    simulation = make_simulation()
    simulation.run(iter(requests), 2)
    summary = simulation.summary(())
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert "the prompt has 400 tokens" in next(iter(summary["errors"]))


# ---- requests ----


def test_requests_come_in_the_order_and_at_the_times_of_the_load_generator():
    dataset, load = DatasetConfig(num_requests=30), LoadConfig(request_rate=5.0, burstiness=0.5)
    from girih.serve.bench.arrivals import arrival_times

    made = make_requests(dataset, as_text=False)
    total, due = due_requests(dataset, load)
    assert total == 30
    assert list(due) == list(zip(arrival_times(made, load, dataset.seed), made, strict=True))


def test_lines_of_a_trace_are_sorted_by_their_times(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 9, "output_length": 2} for t in (500, 0, 250)]
    file.write_text("\n".join(map(json.dumps, lines)))
    dataset = DatasetConfig(kind="trace", file=str(file), num_requests=0, output_len=None)
    total, due = due_requests(dataset, LoadConfig())
    assert (total, [moment for moment, _ in due]) == (3, [0.0, 0.25, 0.5])


def test_texts_with_a_common_beginning_have_common_tokens():
    asked = [
        engine_request(BenchRequest(i, "the same beginning" * 10 + end, 4), 0.0).prompt_token_ids
        for i, end in enumerate(("one", "another"))
    ]
    assert len(asked[0]) == 46  # 183 characters
    assert asked[0][:45] == asked[1][:45] != asked[0][1:]
    chat = [{"role": "user", "content": "hello there"}]
    assert len(engine_request(BenchRequest(0, chat, 4), 0.0).prompt_token_ids) == 5


# ---- figures ----


def test_percentiles_are_right_to_half_a_percent():
    draw = random.Random(1)
    values = [draw.lognormvariate(-2, 1.5) for _ in range(5000)]
    seen = Distribution()
    for value in values:
        seen.add(value)
    ours, exact = seen.describe((90.0, 99.0), 1000), describe([v * 1000 for v in values], (90, 99))
    assert ours.keys() == exact.keys()
    for name in ("mean", "std", "min", "max"):
        assert ours[name] == pytest.approx(exact[name], rel=1e-9)
    for name in ("median", "p90", "p99"):
        assert ours[name] == pytest.approx(exact[name], rel=0.006)


def test_figures_are_those_of_the_load_generator():
    requests, records = traffic(), []
    slo = SloConfig(ttft_ms=800, tpot_ms=120)
    simulation = make_simulation(slo=slo, on_end=records.append)
    simulation.run(iter(requests), len(requests))
    ours = simulation.summary((90.0,))
    theirs = summarize(Measurement("", records, ours["seconds"], False), slo, (90.0,))
    assert 0 < theirs["slo_kept"] < 60
    for name, value in theirs.items():
        if name not in ("latency_ms", "model"):
            assert ours[name] == pytest.approx(value), name
    for name, value in theirs["latency_ms"].items():
        assert ours["latency_ms"][name] == pytest.approx(value, rel=0.02), name


# ---- cost and fit ----


def test_the_clock_adds_up_the_terms():
    clock = StepClock(make_cost())
    draw = random.Random(2)
    for tokens in [*range(1, 300, 7), 4, 16, 64, 256, 1024]:
        shape = StepShape(tokens, draw.randrange(1, 64), draw.randrange(9000), draw.randrange(9000))
        assert clock.seconds(shape) == pytest.approx(np.dot(terms_of(shape), RATES))


def made_shapes(count=400, seed=5):
    draw = random.Random(seed)
    return [
        StepShape(r + draw.choice([0, draw.randrange(500)]), r, r * draw.randrange(900), p)
        for r, p in zip(
            (draw.choice([1, 2, 5, 9, 30, 64]) for _ in range(count)),
            (draw.choice([0, draw.randrange(100000)]) for _ in range(count)),
            strict=False,
        )
    ]


def test_the_fit_finds_the_rates_that_made_the_times():
    quantities = np.array([terms_of(shape) for shape in made_shapes()])
    assert fit_rates(quantities, quantities @ RATES) == pytest.approx(RATES, rel=1e-3)


def test_the_fit_is_not_biased_by_noise_and_has_no_negative_rate():
    quantities = np.array([terms_of(shape) for shape in made_shapes(3000)])
    noise = np.random.default_rng(1).gamma(16, 1 / 16, len(quantities))  # deviates by a quarter
    seconds = (quantities @ RATES) * noise
    rates = fit_rates(quantities, seconds)
    assert min(rates) >= 0
    assert (quantities @ rates).sum() == pytest.approx(seconds.sum(), rel=0.01)
    falling = 0.1 - quantities[:, 6] * 1e-3  # the more requests the faster: no rate can say that
    assert min(fit_rates(quantities, falling)) >= 0


def write_trace(path, num_requests=12):
    core = make_core(runner=FakeRunner(16, step_seconds=0.002), async_scheduling=True)
    core.observers.append(StepTracer(path, core.scheduler))
    for index in range(num_requests):
        core.add_request(make_request(f"r{index}", 10 + index, max_tokens=8))
        for _ in range(6):
            core.step()
    while core.has_work():
        core.step()
    core.close()


def test_a_trace_of_an_engine_becomes_a_cost(tmp_path, capsys):
    trace, out, records = (tmp_path / name for name in ("trace.json", "cost.json", "r.jsonl"))
    write_trace(trace)
    steps = read_trace(str(trace))
    assert len(steps.shapes) > 60 and len(steps.first_token) == 12
    assert steps.shapes[0] == StepShape(10, 1, 0, 55)
    assert all(start < end for start, end in zip(steps.started, steps.ended, strict=True))
    assert all(0.001 < seconds < 1 for seconds in steps.first_token)
    lines = [{"sent": i, "ttft_ms": 1000 * t + 7} for i, t in enumerate(steps.first_token)]
    records.write_text("\n".join(map(json.dumps, lines)))
    words = [f"trace={trace}", f"records={records}", f"out={out}"]
    assert cli.main(["simulate", "fit", *words]) == 0
    assert "off by" in capsys.readouterr().out
    cost = load_cost(str(out))
    assert cost.front == pytest.approx(0.007)
    assert cost.engine == MeasuredEngine(64, 16, 256)
    # A step sleeps for 2 ms, and longer where the machine is busy.
    assert 0.002 <= StepClock(cost).seconds(StepShape(1, 1, 20, 0)) < 0.1
    assert 0 <= cost.gap < 0.1


def test_what_cannot_be_fitted_says_why(tmp_path):
    trace, records = tmp_path / "trace.json", tmp_path / "records.jsonl"
    trace.write_text("[\n")
    with pytest.raises(ConfigError, match="is no file that"):
        read_trace(str(trace))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "none"))
    write_trace(trace, 2)
    with pytest.raises(ConfigError, match="at least 55 are needed"):
        fit_cost(read_trace(str(trace)))
    write_trace(trace)
    records.write_text('{"sent": 1, "ttft_ms": 3}\n')
    with pytest.raises(ConfigError, match="has 1 answers and the trace 12"):
        fit_cost(read_trace(str(trace)), str(records))


def test_a_cost_of_another_version_is_refused(tmp_path):
    file = tmp_path / "cost.json"
    with pytest.raises(ConfigError, match="names no file"):
        load_cost(None)
    cost = make_cost()
    terms = {**cost.terms, "new_term": 0.0}
    StepCost(terms, 0.0, 0.0, cost.engine, cost.error).save(str(file))
    with pytest.raises(ConfigError, match="fit it again"):
        load_cost(str(file))
    file.write_text('{"terms": 3}')
    with pytest.raises(ConfigError, match="is no file of `simulate fit`"):
        load_cost(str(file))


# ---- the command ----


@pytest.fixture
def cost_file(tmp_path):
    make_cost().save(str(tmp_path / "cost.json"))
    return f"cost={tmp_path / 'cost.json'}"


def test_the_command_prints_figures_and_writes_files(cost_file, tmp_path, capsys):
    words = ["num_requests=20", "request_rate=3", "output_len=6", "input_len=40", "slo.ttft_ms=500"]
    files = [f"report.json={tmp_path / 's.json'}", f"report.records={tmp_path / 'r.jsonl'}"]
    assert cli.main(["simulate", "-q", cost_file, *words, *files, "replicas=2"]) == 0
    out = capsys.readouterr().out
    assert "20 completed, 0 failed" in out and "goodput" in out
    assert "engines      2, busy" in out and "preemptions" in out
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["engines"]["replicas"] == 2
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert sum(line["num_output_tokens"] for line in lines) == summary["output_tokens"] == 120


def test_the_same_settings_give_the_same_figures(cost_file, tmp_path, capsys):
    seen = []
    for index in range(2):
        file = tmp_path / f"{index}.json"
        words = ["num_requests=30", "request_rate=3", "dataset=prefix", "dataset.prefix_len=64"]
        assert cli.main(["simulate", "-q", cost_file, *words, f"report.json={file}"]) == 0
        seen.append(json.loads(file.read_text()))
        del seen[-1]["wall_seconds"], seen[-1]["settings"]
    assert seen[0] == seen[1]
    assert seen[0]["engines"]["cache_hit_rate"] > 0.3
    assert seen[0]["cached_tokens"] > 30 * 32


def test_settings_without_a_meaning_are_refused(cost_file, capsys):
    for word, reason in (
        ("cache.kv_cache_bytes=1000", "cache.kv_cache_bytes means nothing"),
        ("report.plots=DIR", "report.plots draws"),
        ("replicas=0", "at least 1"),
        ("simulate.routing=magic", "least_loaded, round_robin"),
    ):
        assert cli.main(["simulate", cost_file, word]) == 2
        assert reason in capsys.readouterr().err


def test_help_of_the_verb_that_is_also_a_family(capsys):
    assert cli.main(["simulate", "--help"]) == 0
    assert "girih simulate: " in capsys.readouterr().out
    assert cli.main(["simulate", "fit", "--help"]) == 0
    assert "girih simulate fit: " in capsys.readouterr().out


def test_blocks_of_another_size_hold_as_many_tokens():
    settings = TwinSettings(SimulateConfig(), LIMITS, CacheConfig(block_size=32), make_cost())
    (replica,) = settings.replicas()
    assert replica.core.stats().kv_cache.num_blocks == 14  # 29 of 16 tokens
    fixed = dataclasses.replace(settings, cache=CacheConfig(num_blocks=9, block_size=32))
    assert fixed.replicas()[0].core.stats().kv_cache.num_blocks == 8
    assert list(itertools.chain(fixed.replicas()[0]._queue.plans)) == []
