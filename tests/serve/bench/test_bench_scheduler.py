from girih.serve.bench import scheduler as bench
from girih.serve.cli.commands.bench_scheduler import run
from girih.serve.cli.verbs import Options


def test_every_case_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "NUM_RUNNING", (1, 16))
    assert run(["steps=12"], Options()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [
        ["decode", "1"],
        ["mixed", "1"],
        ["decode", "16"],
        ["mixed", "16"],
    ]
    assert all(float(value) > 0 for line in lines for value in line[2:])


def test_the_mixed_case_finds_prefixes_and_computes_in_chunks():
    sizes = bench.Sizes(16, 12)
    driver = bench.GirihDriver(sizes)
    steps = bench.play("mixed", sizes, driver)
    stats = driver.scheduler.kv_cache.stats()
    assert stats.prefix_hits >= 10 * bench.LONG_PROMPT_TOKENS // 2
    assert len(driver.scheduler.running) >= 16
    assert len(steps) == 12 and all(max(step.num_tokens) > 1 for step in steps)
    driver.scheduler.check_integrity()
