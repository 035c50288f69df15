"""`girih env`: the report says what is there and hides what is secret."""

import json

import pytest

from girih import __version__
from girih.kernels.base.target import PRODUCTS
from girih.serve.cli import environment
from girih.serve.cli import main as cli
from girih.serve.cli.environment import readable_bytes, size_of


def test_the_report_names_versions_machine_and_models(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GIRIH_API_KEY", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    model = tmp_path / "models" / "tiny-1"
    model.mkdir(parents=True)
    (model.parent / ".tiny-1.lock").touch()
    (model / "w.bin").write_bytes(b"x" * 2048)
    assert cli.main(["env", "json=true"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["girih"]["girih"].startswith(__version__)
    assert report["girih"]["torch"]
    isa, _, products = report["machine"]["instructions"].partition(": ")
    assert products == PRODUCTS[isa]
    assert report["cache"]["models"] == "1 entry, 2.0 KiB"
    assert report["models"] == {"tiny-1": "2.0 KiB"}
    assert report["variables"]["OMP_NUM_THREADS"] == "3"
    assert report["variables"]["GIRIH_API_KEY"] == "(hidden)"
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    assert "  tiny-1" in text


def test_the_home_directory_is_not_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    report = {"cache": {"directory": f"{tmp_path}/.cache/girih"}, "models": {}}
    assert environment.as_text(report).splitlines() == [
        "cache",
        "  directory      ~/.cache/girih",
        "models",
        "  (none)",
    ]


def test_a_machine_without_tools_or_cache_is_reported_too(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environment, "_text", lambda path: "")
    report = environment.environment_report()
    assert report["machine"]["compiler"].endswith("is not installed")
    assert report["machine"]["memory"] == "unknown"
    assert report["cache"] == {"directory": str(tmp_path / "none")}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")]
)
def test_sizes_for_people(count, text):
    assert readable_bytes(count) == text


def test_links_do_not_count_twice(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert 100 <= size_of(tmp_path) < 200 + len(str(tmp_path))
