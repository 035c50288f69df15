"""Model sources: what is accepted, and how everything else is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from girih.graph.sources import resolve_source
from girih.kernels.errors import SourceError, WeightError


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


@pytest.mark.parametrize("content", ["{broken", "[1, 2]", "\udcff"])
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


def test_missing_path(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        resolve_source(str(tmp_path / "nowhere"))


def test_resolving_a_directory_imports_neither_torch_nor_transformers(tmp_path):
    path = write_model(tmp_path / "m")
    script = (
        "import sys; from girih.graph.sources import resolve_source; resolve_source(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
