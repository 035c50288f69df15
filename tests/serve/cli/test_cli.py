"""The command as users run it; the engine behind it is a fake one."""

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import support_tokenizer
from support_bundles import small_bundle
from support_models import tiny_model
from support_serving import fake_engine

from girih import __version__
from girih.graph.bundle.files import BundleKey
from girih.serve.cli import main as cli
from girih.serve.cli.commands import bench_offline
from girih.serve.cli.verbs import VERBS
from girih.serve.config import BenchConfig

WORKLOADS = {
    "token_range": [10, 60],
    "workloads": [
        {
            "name": name,
            "num_requests": 3,
            "prompt_len": 20,
            "output_len": 4,
            "shared_prefix": shared,
            "seed": seed,
        }
        for name, shared, seed in (("small", 0, 1), ("prefix", 40, 2))
    ],
}


@pytest.fixture
def engine(monkeypatch):
    """Stands in for launching a real engine; records the configurations it was given."""
    tokenizer = support_tokenizer.byte_level()
    seen = types.SimpleNamespace(tokenizer=tokenizer, configs=[], built=None)

    def build_engine(config, progress):
        seen.configs.append(config)
        seen.built = fake_engine(tokenizer)
        support_tokenizer.write_files(Path(seen.built.facts.model_path))
        return seen.built

    fake: Any = types.ModuleType("girih.runtime.start.launch")
    fake.build_engine = build_engine
    fake.explain = lambda config, progress: f"level {config.opt.level}\npieces=3 tiles=2"
    fake.compile = lambda config, progress: f"bundle {config.compile.bundle}"
    monkeypatch.setitem(sys.modules, "girih.runtime.start.launch", fake)
    import girih.runtime.start

    monkeypatch.setattr(girih.runtime.start, "launch", fake, raising=False)
    return seen


def run(capsys, *words):
    code = cli.main(list(words))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_generate_prints_the_text_only(engine, capsys):
    code, out, _ = run(capsys, "generate", "model=x/y", "prompt=one, two", "max_tokens=9", "opt=O0")
    assert code == 0
    from girih.runtime.records.sampling_params import SamplingParams
    from girih.serve.offline.llm import LLM

    llm = LLM.from_engine(fake_engine(engine.tokenizer), engine.tokenizer)
    params = SamplingParams(temperature=0, max_tokens=9)
    assert out == llm.generate("one, two", params)[0].outputs[0].text + "\n"
    (config,) = engine.configs
    assert (config.model.source, config.opt.level) == ("x/y", "O0")


def test_generate_several_and_from_stdin(engine, capsys, monkeypatch):
    single = run(capsys, "-q", "generate", "prompt=b", "max_tokens=3")[1]
    both = run(capsys, "-q", "generate", "prompts=[a,b]", "max_tokens=3")[1]
    assert both.endswith(single)
    monkeypatch.setattr("sys.stdin", io.StringIO("b"))
    code, out, err = run(capsys, "generate", "prompt=-", "max_tokens=3", "-q")
    assert (code, out, err) == (0, single, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prompt=b", "max_tokens=3"], "girih: the text stopped at max_tokens=3; give"),
        (["prompts=[a,b]", "max_tokens=3"], "girih: 2 of 2 texts stopped at max_tokens=3; give"),
        (["prompt=" + "ab " * 100, "max_tokens=9999"], "the text filled the context of 256"),
    ],
)
def test_generate_says_when_it_stopped_at_a_limit(engine, capsys, words, told):
    code, _, err = run(capsys, "generate", *words)
    assert (code, err.count("girih: ")) == (0, 1)
    assert told in err


def test_generate_says_nothing_of_a_text_that_ended(engine, capsys, monkeypatch):
    monkeypatch.setattr("girih.serve.cli.commands.generate._stream", lambda *_: ("stop", 3))
    assert "girih: " not in run(capsys, "generate", "prompt=b", "max_tokens=3")[2]


def test_generate_chat(engine, capsys):
    text = run(capsys, "generate", "prompt=a", "chat=true", "max_tokens=3")[1]
    assert text != run(capsys, "generate", "prompt=a", "max_tokens=3")[1]


def test_generate_refuses_what_cannot_be(engine, capsys):
    assert run(capsys, "generate")[0] == 2
    code, _, err = run(capsys, "generate", "prompt=a", "max_tokens=0")
    assert code == 2
    assert "sampling: max_tokens is 0" in err
    assert run(capsys, "generate", "prompt=")[::2] == (
        2,
        "girih: a prompt is empty; give at least one character\n",
    )
    assert engine.configs == []  # told before the long work


def test_compile_and_explain(engine, capsys):
    assert run(capsys, "compile", "bundle=B")[1] == "bundle B\n"
    assert run(capsys, "explain", "opt=O0")[1].splitlines() == ["level O0", "pieces=3 tiles=2"]


def test_bench_prints_one_result_per_workload(engine, capsys, tmp_path):
    file = tmp_path / "workloads.json"
    file.write_text(json.dumps(WORKLOADS))
    code, out, _ = run(capsys, "bench", "offline", f"workload_file={file}", "rounds=3")
    ready, *results = out.splitlines()
    assert code == 0
    assert ready.startswith("READY ")
    rows = [json.loads(line.removeprefix("RESULT ")) for line in results]
    assert [row["workload"] for row in rows] == ["small", "prefix"]
    fields = {"engine", "workload", "seconds", "output_tok_s", "total_tok_s"}
    assert all(set(row) == fields for row in rows)
    ratio = rows[1]["total_tok_s"] / rows[1]["output_tok_s"]
    assert ratio == pytest.approx((4 + 60) / 4, rel=0.02)
    # Only the "prefix" workload finds its earlier rounds in the cache.
    plans = engine.built.core.runner.plans
    hits = [r.num_computed_tokens for plan in plans for r in plan.new_requests]
    assert sum(hit > 0 for hit in hits[1:10]) == 0
    assert all(hit >= 32 for hit in hits[13:])
    one = run(capsys, "bench", "offline", f"workload_file={file}", "workloads=[prefix]")[1]
    assert one.count("RESULT") == 1


def test_bench_prompts_are_those_of_the_shared_generator():
    import random

    spec = WORKLOADS["workloads"][1]
    draw = random.Random(2)
    stream = [draw.randrange(10, 60) for _ in range(40 + 3 * 20)]
    prompts = list(bench_offline.make_prompts(spec, 10, 60))
    assert prompts == [stream[:40] + stream[40 + 20 * i : 60 + 20 * i] for i in range(3)]


def test_bench_brings_its_workloads():
    names = [spec["name"] for spec, _ in bench_offline.read_workloads(BenchConfig())]
    assert names == ["single", "batch8", "batch32", "prefill", "long", "prefix"]


def test_bench_mistakes(engine, capsys, tmp_path):
    file = tmp_path / "workloads.json"
    assert run(capsys, "bench")[0] == 2
    assert run(capsys, "bench", "online")[0] == 2
    assert "cannot be read" in run(capsys, "bench", "offline", f"workload_file={file}")[2]
    file.write_text(json.dumps(WORKLOADS))
    code, _, err = run(
        capsys, "bench", "offline", f"workload_file={file}", "workloads=[smal]", "rounds=1"
    )
    assert code == 2
    assert "small, prefix" in err
    assert bench_offline.read_workloads(BenchConfig(str(file), ("small",)))[0][0]["name"] == "small"


def test_serve_reports_a_port_in_use(engine, capsys):
    from girih.serve.http.port import open_port

    with open_port("127.0.0.1", 0) as taken:
        taken.listen()
        code, out, err = run(capsys, "serve", f"port={taken.getsockname()[1]}", "-q")
    assert (code, out) == (1, "")
    assert "in use" in err


def test_fetch_prints_the_directory(capsys, monkeypatch, tmp_path):
    from girih.serve.cli.commands import fetch

    monkeypatch.setattr(
        fetch, "resolve_source", lambda source, progress: types.SimpleNamespace(path=tmp_path)
    )
    assert run(capsys, "fetch", "model=smollm2")[1] == f"{tmp_path}\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["generat"], "did you mean `girih generate`"),
        (["xyz"], "`girih help` lists the verbs"),
        (["generate", "schedular.x=1"], "scheduler"),
        (["generate", "--max-tokns=3"], "max_tokens=VALUE"),
        (["generate", "-x"], "unknown flag"),
        (["serve", "port=x"], "serve.port is 'x'; it must be an integer"),
        (["serve", "port=70000"], "0 to 65535"),
        (["generate", "prompt=x", "scheduler.policy=lifo"], "fcfs"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_hint(engine, capsys, words, hint):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert hint in err
    assert err.startswith("girih: ")


def test_debug_shows_the_traceback():
    from girih.kernels.base.errors import ConfigError

    with pytest.raises(ConfigError):
        cli.main(["generate", "zzz=1", "--debug"])


def test_cfg_prints_the_settings(capsys):
    out = run(capsys, "serve", "port=81", "--cfg")[1]
    assert "port: 81" in out


def test_interrupt_is_130(engine, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("girih.serve.cli.commands.generate.compose_config", interrupted)
    assert run(capsys, "generate", "prompt=a")[0] == 130


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_fits_a_screen_and_names_every_key(capsys, verb):
    from girih.conf import schema

    code, out, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 100
    for key in schema.leaf_types(verb):
        assert key.split(".", 1)[-1] in out, key
    full = run(capsys, *verb.split(), "--help-all")[1]
    assert all(key in full for key in schema.leaf_types(verb))


HEAVY = ("torch", "transformers", "hydra", "omegaconf", "fastapi", "uvicorn", "tokenizers")


def test_help_imports_nothing_heavy():
    commands = [[], ["--version"], ["--help"], *([*v.split(), "-h"] for v in VERBS)]
    code = (
        "import contextlib, io, sys\nfrom girih.serve.cli.main import main\n"
        f"for words in {commands!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "        code = main(list(words))\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print(words, code, heavy, 'girih' in text.getvalue())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [f"{words} 0 [] True" for words in commands]


def test_help_of_a_first_word_names_its_verbs(capsys):
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0
    assert "girih bench offline" in out
    assert "girih bench serve" in out


def test_version(capsys):
    assert run(capsys, "--version")[1] == f"girih {__version__}\n"
    assert run(capsys)[0] == 0


def test_what_only_lists_or_reads_imports_no_torch(tmp_path):
    model = f"model={tiny_model('llama')}"
    commands = [
        ["models"],
        ["cache", "list"],
        ["cache", "verify"],
        ["cache", "prune"],
        ["cache", "explain", model, "-q"],
        ["passes", "list"],
        ["fetch", model, "-q"],
        ["completion", "bash"],
        ["serve", model, "--cfg"],
    ]
    code = (
        "import sys\nfrom girih.serve.cli.main import main\n"
        f"for words in {commands!r}:\n"
        "    code = main(list(words))\n"
        "    heavy = [n for n in ('torch', 'transformers') if n in sys.modules]\n"
        "    print(words[:2], code, heavy, file=sys.stderr)"
    )
    cache = tmp_path / "bundles"
    small_bundle(cache, BundleKey((("model.dtype", "float32"),)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "GIRIH_CACHE_DIR": str(tmp_path)},
    )
    assert done.stderr.splitlines() == [f"{words[:2]} 0 []" for words in commands]
    assert "1 bundles, 0 damaged" in done.stdout
    assert "miss: the nearest bundle" in done.stdout


def test_settings_errors_import_no_torch():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom girih.serve.cli.main import main\n"
            "code = main(['generate', 'opt=O9'])\n"
            "print(code, 'torch' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["2", "False"]
