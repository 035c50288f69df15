"""Model sources: what is accepted, and how everything else is refused."""

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from girih.graph.files.sources import check_source, is_hub_id, resolve_source
from girih.kernels.base.errors import SourceError, WeightError


def write_model(path: Path, config: dict | None = None, dtype: torch.dtype = torch.float16) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file({"w": torch.zeros(4, 4, dtype=dtype)}, path / "model.safetensors")
    return path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file_directory(tmp_path):
    path = write_model(tmp_path / "my-model")
    files = resolve_source(str(path))
    assert files.path == path
    assert files.weights == (path / "model.safetensors",)
    assert files.gguf is None
    assert files.name == "my-model"


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"dtype": "float32"}, torch.float16, "float32"),
        ({"torch_dtype": "bfloat16"}, torch.float16, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, torch.float16, "bfloat16"),
        ({"model_type": "llama"}, torch.float16, "float16"),
        ({"model_type": "llama"}, torch.int8, "float32"),
    ],
)
def test_checkpoint_dtype(tmp_path, config, stored, expected):
    assert resolve_source(str(write_model(tmp_path / "m", config, stored))).dtype == expected


def test_numbered_shards_without_index(tmp_path):
    path = write_model(tmp_path / "m")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for name in names:
        (path / name).write_bytes(content)
    assert [p.name for p in resolve_source(str(path)).weights] == names
    (path / names[1]).unlink()
    with pytest.raises(WeightError, match=names[1]):
        resolve_source(str(path))


def test_index_naming_a_missing_shard(tmp_path):
    path = write_model(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-a.safetensors")
    write_index(path, {"w": "model-a.safetensors", "x": "model-b.safetensors"})
    with pytest.raises(WeightError, match=r"model-b\.safetensors"):
        resolve_source(str(path))


def test_directory_without_config_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceError, match=r"no config\.json \(it holds notes\.txt, sub/\)"):
        resolve_source(str(tmp_path))


def test_empty_directory(tmp_path):
    with pytest.raises(SourceError, match=r"no config\.json \(it is empty\)"):
        resolve_source(str(tmp_path))


def test_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no \*\.safetensors files"):
        resolve_source(str(tmp_path))


def test_directory_with_pickled_weights_only(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"pickle files \(pytorch_model\.bin\).*safe_serial"):
        resolve_source(str(tmp_path))


@pytest.mark.parametrize("content", ["{broken", "[1, 2]", "\udcff", '{"a": ' + "[" * 100_000])
def test_unreadable_config(tmp_path, content):
    path = write_model(tmp_path / "m")
    (path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SourceError, match=r"config\.json"):
        resolve_source(str(path))


@pytest.mark.parametrize("index", ["{broken", "{}", '{"weight_map": []}'])
def test_unreadable_index(tmp_path, index):
    path = write_model(tmp_path / "m")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SourceError, match=r"model\.safetensors\.index\.json"):
        resolve_source(str(path))


def test_index_that_names_a_shard_by_a_number(tmp_path):
    path = write_model(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-a.safetensors")
    write_index(path, {"v": "model-a.safetensors", "w": 3})
    with pytest.raises(
        SourceError, match=r"index\.json: 'weight_map' has 3 for tensor 'w'; it must"
    ):
        resolve_source(str(path))


def test_missing_path(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        resolve_source(str(tmp_path / "nowhere"))


def test_resolving_a_directory_imports_neither_torch_nor_transformers(tmp_path):
    path = write_model(tmp_path / "m")
    script = (
        "import sys; from girih.graph.files.sources import resolve_source\n"
        "resolve_source(sys.argv[1])\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


class FakeHub:
    """Stands in for the hub client: `local` and `remote` are directories or errors."""

    def __init__(self, local: Path | Exception, remote: Path | Exception) -> None:
        self.answers = {True: local, False: remote}
        self.calls: list[bool] = []
        self.patterns: list[list[str]] = []

    def snapshot_download(self, repo, allow_patterns, local_files_only, ignore_patterns=()):
        assert repo == "org/some-model"
        self.calls.append(local_files_only)
        self.patterns.append(allow_patterns)
        answer = self.answers[local_files_only]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


def use_hub(monkeypatch, local: Path | Exception, remote: Path | Exception) -> FakeHub:
    hub = FakeHub(local, remote)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    return hub


def test_a_directory_of_a_cache_has_the_name_of_its_model(tmp_path, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    for folder, name in (
        ("models/smollm2-0123abcd", "smollm2"),
        ("models/gemma3_270m-0123abcd", "gemma3_270m"),
        ("models/mine-0123abcd", "mine-0123abcd"),
        ("elsewhere/smollm2-0123abcd", "smollm2-0123abcd"),
        ("hub/models--org--some-model/snapshots/0123abcd", "some-model"),
        ("hub/org/snapshots/0123abcd", "0123abcd"),
    ):
        path = write_model(tmp_path / folder)
        assert resolve_source(str(path)).name == name
    (tmp_path / "link").symlink_to(tmp_path / "models" / "smollm2-0123abcd")
    assert resolve_source(str(tmp_path / "link")).name == "smollm2"


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("org/some-model", True),
        ("smollm2", False),
        ("./org/some-model", False),
        ("/org/some-model", False),
        ("org/here", False),
    ],
)
def test_what_is_written_as_a_hub_id(tmp_path, monkeypatch, source, is_id):
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(source) is is_id


def test_hub_id_in_the_local_cache_asks_no_hub(tmp_path, monkeypatch):
    snapshot = write_model(tmp_path / "0123abcd")
    hub = use_hub(monkeypatch, snapshot, OSError("asked the hub"))
    files = resolve_source("org/some-model")
    assert (files.path, files.name) == (snapshot, "some-model")
    assert set(hub.calls) == {True}


def test_hub_id_with_an_incomplete_local_copy_is_downloaded(tmp_path, monkeypatch):
    partial = write_model(tmp_path / "partial")
    (partial / "model.safetensors").unlink()
    full = write_model(tmp_path / "full")
    hub = use_hub(monkeypatch, partial, full)
    events = []
    assert resolve_source("org/some-model", events.append).path == full
    assert hub.calls == [True, True, False, False]
    assert [event.stage for event in events] == ["download"]
    assert "*.safetensors" in hub.patterns[2]
    assert not any("bin" in pattern for asked in hub.patterns for pattern in asked)


def test_what_is_read_in_folders_is_asked_for_too(tmp_path, monkeypatch):
    snapshot = write_model(tmp_path / "0123abcd")
    hub = use_hub(monkeypatch, snapshot, OSError("asked the hub"))
    resolve_source("org/some-model")
    assert hub.calls == [True, True]
    wanted = ("1_Pooling/config.json", "2_Dense/model.safetensors")
    for file in (*wanted, "additional_chat_templates/tool_use.jinja"):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in hub.patterns[-1])
    assert not any(fnmatch.fnmatch("onnx/config.json", pattern) for pattern in hub.patterns[-1])


def test_hub_id_offline_says_what_was_tried(monkeypatch):
    use_hub(monkeypatch, OSError("nothing cached"), RuntimeError("no route\nlong trace"))
    with pytest.raises(SourceError) as caught:
        resolve_source("org/some-model")
    message = str(caught.value)
    for part in ("'org/some-model'", "no local path", "nothing cached", "no route", "directory"):
        assert part in message
    assert "long trace" not in message


@pytest.mark.parametrize(("name", "nearest"), [("smolm2", "smollm2"), ("gemma3", "gemma3_270m")])
def test_unknown_name_suggests_the_nearest(name, nearest):
    with pytest.raises(SourceError, match=rf"unknown model '{name}': did you mean '{nearest}'\?"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["", "zzzzz", "a/b/c"])
def test_unknown_name_lists_what_is_allowed(name):
    with pytest.raises(SourceError, match=r"built-in name \(smollm2, gemma3_270m, minilm\)"):
        resolve_source(name)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("https://huggingface.co/org/name", "by its id: org/name"),
        ("https://huggingface.co/org/name/tree/main", "by its id: org/name"),
        ("hf.co/org/name", "by its id: org/name"),
        ("http://127.0.0.1:8000/v1", "`girih chat url=URL` talks to a server"),
    ],
)
def test_an_address_is_no_model(source, told):
    for look in (resolve_source, check_source):
        with pytest.raises(SourceError, match=told):
            look(source)


def test_looking_at_a_source_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("girih.graph.files.sources.fetch_model", None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    for source in ("smollm2", "org/some-model", str(write_model(tmp_path / "m"))):
        check_source(source)
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "x.gguf").write_bytes(b"no gguf")
    for wrong in (str(tmp_path / "m"), str(tmp_path / "x.gguf"), "/none/such", "smolm2"):
        with pytest.raises(SourceError):
            check_source(wrong)


def test_builtin_name_wins_over_a_directory_of_that_name(tmp_path, monkeypatch):
    fetched = write_model(tmp_path / "cache")
    here = write_model(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("girih.graph.files.sources.fetch_model", lambda name, progress: fetched)
    assert resolve_source("smollm2").path == fetched
    assert resolve_source("./smollm2").path.resolve() == here


def test_builtin_model_with_a_file_deleted_says_how_to_recover(tmp_path, monkeypatch):
    fetched = write_model(tmp_path / "cache")
    (fetched / "model.safetensors").unlink()
    monkeypatch.setattr("girih.graph.files.sources.fetch_model", lambda name, progress: fetched)
    with pytest.raises(SourceError, match="to fetch smollm2 again"):
        resolve_source("smollm2")


def test_file_that_is_no_gguf(tmp_path):
    write_model(tmp_path / "m")
    with pytest.raises(SourceError, match=r"not a \.gguf file"):
        resolve_source(str(tmp_path / "m" / "model.safetensors"))


def test_missing_gguf(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        resolve_source("no-such-file.gguf")


def test_directory_that_holds_a_gguf_points_at_the_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match=r"give the \.gguf file itself"):
        resolve_source(str(tmp_path))


@pytest.mark.parametrize("source", ["a" * 5000, "~no-such-user-here/model"])
def test_a_path_that_cannot_be_looked_at_is_a_source_error(source):
    with pytest.raises(SourceError, match="cannot be looked at"):
        resolve_source(source)
