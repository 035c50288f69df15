"""`girih models` and `girih models rm`: what is on this machine, and removing it."""

import functools
from typing import Any

import huggingface_hub
import pytest

from girih.graph.files.fetch import builtin_path
from girih.serve.cli import main as cli


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A cache with a built-in model, one of another version, a conversion, and a hub's cache."""
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    for path in (
        builtin_path("smollm2"),
        tmp_path / "models" / "smollm2-old",
        tmp_path / "gguf" / "mine-0123-1",
        tmp_path / "models" / ".smollm2-half",
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_bytes(b"x" * 2048)
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "b").write_bytes(b"x" * 4096)
    (repo / "snapshots" / "0123").mkdir(parents=True)
    (repo / "snapshots" / "0123" / "config.json").symlink_to("../../blobs/b")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123")
    scan = functools.partial(huggingface_hub.scan_cache_dir, tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    return tmp_path


def run(capsys, *words):
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def rows(capsys):
    lines = run(capsys, "models")[1].splitlines()
    return {tuple(line.split()[:2]): line for line in lines[:-1]}, lines[-1]


def test_all_kinds_are_listed_with_sizes(capsys, machine):
    found, total = rows(capsys)
    assert list(found) == [
        ("smollm2", "built-in"),
        ("gemma3_270m", "built-in"),
        ("minilm", "built-in"),
        ("smollm2-old", "left"),
        ("mine-0123-1", "converted"),
        ("org/name", "hub"),
    ]
    assert "2.0 KiB" in found["smollm2", "built-in"]
    assert str(builtin_path("smollm2")) in found["smollm2", "built-in"]
    assert "4.0 KiB" in found["org/name", "hub"]
    assert "`girih fetch minilm` downloads 79.6 MiB" in found["minilm", "built-in"]
    assert total.startswith("10.0 KiB on this disk")


def test_a_machine_without_any_cache(capsys, machine, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(machine / "none"))
    patched: Any = huggingface_hub.scan_cache_dir  # by the fixture
    scan = functools.partial(patched.func, machine / "no-hub")
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    found, total = rows(capsys)
    assert [name for name, _ in found] == ["smollm2", "gemma3_270m", "minilm"]
    assert total.startswith("0 B on this disk")


@pytest.mark.parametrize("name", ["smollm2", "smollm2-old", "mine-0123-1", "org/name"])
def test_one_is_removed_and_the_others_stay(capsys, machine, name):
    before, _ = rows(capsys)
    (place,) = (line.split()[-1] for (known, _), line in before.items() if known == name)
    assert run(capsys, "models", "rm", name) == (0, f"removed {place} ({_size(name)})\n", "")
    after, _ = rows(capsys)
    here = {key for key, line in before.items() if "girih fetch" not in line}
    left = {key for key, line in after.items() if "girih fetch" not in line}
    assert {known for known, _ in here - left} == {name}
    assert not list(machine.rglob("*-removed"))


def _size(name):
    return "4.0 KiB" if name == "org/name" else "2.0 KiB"


@pytest.mark.parametrize("name", ["minilm", "org/none", "..", "/", "smollm2-71caed5"])
def test_what_is_not_there_is_refused_with_what_is(capsys, name):
    code, out, err = run(capsys, "models", "rm", name)
    assert (code, out) == (1, "")
    assert "on this machine: smollm2, smollm2-old, mine-0123-1, org/name" in err


def test_rm_needs_a_name(capsys):
    code, _, err = run(capsys, "models", "rm")
    assert (code, "girih models rm NAME" in err) == (2, True)
