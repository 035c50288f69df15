"""Shell completion: what is offered, and the scripts in the shells themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from girih.kernels.base.errors import ConfigError
from girih.serve.cli import main as cli
from girih.serve.cli.completion import FILES, SHELLS, candidates, script
from girih.serve.cli.verbs import VERBS


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["gen"], ["generate"]),
        (["bench", "o"], ["offline"]),
        (["hel"], ["help"]),
        (["help", "gen"], ["generate"]),
        (["help", "bench", "o"], ["offline"]),
        (["help", "serve", "po"], []),
        (["serve", "smo"], ["smollm2"]),
        (["cache", "list", "smo"], []),
        (["bench", "se"], ["serve"]),
        (["-q", "bench", "o"], ["offline"]),
        (["serve", "opt=O0"], ["opt=O0"]),
        (["serve", "dataset"], []),
        (["bench", "serve", "dataset=r"], ["dataset=random"]),
        (["generate", "chat=t"], ["chat=true"]),
        (["generate", "ignore_eos="], ["ignore_eos=true", "ignore_eos=false"]),
        (["generate", "port"], []),
        (["serve", "po"], ["port="]),
        (["serve", "dtype=f"], ["dtype=float16", "dtype=float32"]),
        (["serve", "scheduler.policy="], ["scheduler.policy=fcfs", "scheduler.policy=priority"]),
        (["serve", "bundle_missing=b"], ["bundle_missing=build"]),
        (["serve", "serve.tool_parser=n"], ["serve.tool_parser=none"]),
        (["serve", "serve.reasoning_parser=q"], ["serve.reasoning_parser=qwen3"]),
        (["passes", "run", "opt.stop_after=m"], ["opt.stop_after=merge_sibling_linears"]),
        (["bench", "serve", "api="], ["api=completions", "api=chat"]),
        (["simulate", "simulate.routing=r"], ["simulate.routing=round_robin"]),
        (["serve", "port="], []),
        (["bench", "serve", "report.json="], [FILES]),
        (["generate", "model=./x"], [FILES]),
        (["generate", "prompt="], []),
        (["serve", "--he"], ["--help", "--help-all"]),
        (["completion", "z"], ["zsh"]),
        (["nonsense", "x"], []),
    ],
)
def test_what_is_offered(line, offered):
    assert candidates(line) == offered


def test_models_that_can_be_removed_are_offered(tmp_path, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    (tmp_path / "gguf" / "some-model").mkdir(parents=True)
    assert candidates(["models", "rm", "so"]) == ["some-model"]


def test_every_verb_can_be_reached():
    for name in VERBS:
        first, *rest = name.split()
        assert first in candidates([""])
        if rest:
            assert rest[0] in candidates([first, ""])


def test_every_offered_key_composes():
    from girih.conf import schema

    for verb in schema.VERBS:
        keys = [word for word in candidates([*verb.split(), ""]) if word.endswith("=")]
        leaves = schema.leaf_types(verb)
        for key in keys:
            name = key[:-1]
            assert name in schema.GROUPS or schema.ALIASES.get(name, name) in leaves


def test_what_is_offered_is_what_the_settings_take():
    from girih.conf import schema
    from girih.kernels.base.records import to_record

    for verb in schema.VERBS:
        for key, allowed in schema.choices(verb).items():
            section, name = key.split(".")
            record = schema.SECTIONS[section]
            for value in allowed:
                settings = {name: value, **BESIDE.get((name, value), {})}
                assert getattr(to_record(record, settings), name) == value
            if key != "opt.stop_after":  # names the nearest pass
                with pytest.raises(ConfigError, match=rf"{key} is 'zzz'; it must be one of "):
                    record(**{name: "zzz"})


BESIDE = {
    ("restart", "on-failure"): {"process": "process"},
    ("kind", "sharegpt"): {"file": "f"},
    ("kind", "trace"): {"file": "f"},
}
"""What else a value needs."""


def test_completing_imports_nothing_heavy():
    code = (
        "import sys\nfrom girih.serve.cli.main import main\n"
        "main(['completion', 'words', 'serve', ''])\n"
        "print([n for n in ('torch', 'hydra', 'fastapi', 'httpx') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_verb_prints_a_script(capsys):
    for shell in SHELLS:
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == script(shell)
    assert cli.main(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


@pytest.fixture
def shell_run(tmp_path):
    """Runs a program in a shell where `girih` is this one."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    command = bin_dir / "girih"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom girih.serve.cli.main import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    (tmp_path / "my file.jsonl").write_text("")

    def run(shell, program):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(
            [shell, "-c", script(shell) + program],
            capture_output=True,
            text=True,
            env=env,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        return done.stdout.splitlines(), done.stderr

    return run


BASH = 'COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _girih; printf "%s\\n" "${{COMPREPLY[@]}}"'


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("girih gen", ["generate"]),
        ("girih bench se", ["serve"]),
        ("girih serve opt=O0", ["O0"]),
        ("girih serve max_num_s", ["max_num_seqs="]),
        ("girih bench serve report.json=my", ["my file.jsonl"]),
        ("girih serve --deb", ["--debug"]),
    ],
)
def test_bash(shell_run, line, replies):
    assert shell_run("bash", BASH.format(line=line)) == (replies, "")


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("girih gen", ["generate"]),
        ("girih serve opt=O0", ["opt=O0"]),
        ("girih bench serve report.json=my", ["report.json=my file.jsonl"]),
    ],
)
def test_fish(shell_run, line, replies):
    assert shell_run("fish", f"complete -C {line!r}")[0] == replies


def test_zsh(shell_run):
    # compsys needs a terminal; its calls are recorded instead.
    stubs = """
compdef() { }; compadd() { print -rl -- "${@:#-*}"; }; compset() { print -r prefix; }
_files() { print -r files; }
"""
    program = stubs + "words=(girih serve opt=O0); CURRENT=3; _girih\n"
    text = script("zsh")
    assert text.startswith("#compdef girih")
    lines, errors = shell_run("zsh", "\n" + program)
    assert lines[-1:] == ["opt=O0"], errors
    lines, _ = shell_run(
        "zsh", stubs + "words=(girih bench serve report.json=); CURRENT=4; _girih\n"
    )
    assert lines == ["prefix", "files"]


def test_the_scripts_are_files_of_their_shell(tmp_path):
    for shell in SHELLS:
        if shutil.which(shell):
            file = Path(tmp_path, shell)
            file.write_text(script(shell))
            subprocess.run([shell, "-n", str(file)], check=True, timeout=30)
