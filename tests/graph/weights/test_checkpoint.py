"""Checkpoints: reading, and refusing what is damaged."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from girih.graph.files.sources import resolve_source
from girih.graph.weights.checkpoint import open_checkpoint
from girih.kernels.base.errors import WeightError

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        EMBED: torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        NORM: torch.randn(5, generator=generator),
        "steps": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


def write_model(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    save_file(tensors, path / "model.safetensors")
    return path


def write_sharded(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items(), start=1):
        shard = f"model-{i:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, path / shard)
        weight_map[name] = shard
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("write", [write_model, write_sharded])
def test_reads_every_tensor_as_stored(tmp_path, write):
    tensors = make_tensors()
    with open_checkpoint(resolve_source(str(write(tmp_path / "m", tensors)))) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(tensors)
        for name, expected in tensors.items():
            got = checkpoint.read(name)
            assert checkpoint.shape(name) == tuple(expected.shape)
            assert checkpoint.dtype(name) == str(expected.dtype).removeprefix("torch.")
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


def test_casts_floating_tensors_only(tmp_path):
    tensors = make_tensors()
    with open_checkpoint(resolve_source(str(write_model(tmp_path / "m", tensors)))) as checkpoint:
        assert torch.equal(checkpoint.read(EMBED, "float32"), tensors[EMBED].float())
        assert torch.equal(checkpoint.read(NORM, "float16"), tensors[NORM].half())
        assert checkpoint.read("steps", "bfloat16").dtype == torch.int64


def test_a_read_tensor_survives_close_and_is_writable(tmp_path):
    tensors = make_tensors()
    path = write_model(tmp_path / "m", tensors)
    checkpoint = open_checkpoint(resolve_source(str(path)))
    got = checkpoint.read(NORM)
    checkpoint.close()
    got += 1
    assert torch.equal(got, tensors[NORM] + 1)
    with open_checkpoint(resolve_source(str(path))) as again:
        assert torch.equal(again.read(NORM), tensors[NORM])


def test_missing_tensor_names_the_nearest(tmp_path):
    path = write_model(tmp_path / "m", make_tensors())
    with (
        open_checkpoint(resolve_source(str(path))) as checkpoint,
        pytest.raises(WeightError, match=r"'model\.norms\.weight'.*nearest.*model\.norm\.weight"),
    ):
        checkpoint.read("model.norms.weight")


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_truncated_file_is_refused_at_open(tmp_path, keep):
    path = write_model(tmp_path / "m", make_tensors())
    files = resolve_source(str(path))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors is damaged.*file has"):
        open_checkpoint(files)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"w": {"dtype": "F32", "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"w": ' + b"[" * 100_000,
    ],
    ids=lambda header: header[:60].decode(),
)
def test_bad_header_is_refused(tmp_path, header):
    path = write_model(tmp_path / "m", make_tensors())
    files = resolve_source(str(path))
    content = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match="not a safetensors header"):
        open_checkpoint(files)


def test_every_shard_is_checked_at_open(tmp_path):
    path = write_sharded(tmp_path / "m", make_tensors())
    files = resolve_source(str(path))
    last = files.weights[1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(WeightError, match=last.name):
        open_checkpoint(files)


def test_shard_removed_after_resolving(tmp_path):
    path = write_sharded(tmp_path / "m", make_tensors())
    files = resolve_source(str(path))
    files.weights[2].unlink()
    with pytest.raises(WeightError, match=files.weights[2].name):
        open_checkpoint(files)


def test_index_that_lists_a_tensor_no_shard_has(tmp_path):
    path = write_sharded(tmp_path / "m", make_tensors())
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = content["weight_map"][NORM]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightError, match=r"model\.ghost"):
        open_checkpoint(resolve_source(str(path)))


def write_doubled(path: Path, counts: int) -> Path:
    """Three shards, of which two hold the norm, as zeros and as ones; the index names one."""
    path = write_sharded(path, make_tensors())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    for number in (0, 2):
        held = {n: t for n, t in make_tensors().items() if index["weight_map"][n] == shards[number]}
        save_file({**held, NORM: torch.full((5,), float(number == 2))}, path / shards[number])
    (path / index["weight_map"].pop(NORM)).unlink()
    index["weight_map"][NORM] = shards[counts]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("counts", [0, 2])
def test_the_index_decides_about_a_tensor_in_two_shards(tmp_path, counts):
    path = write_doubled(tmp_path / "m", counts)
    with open_checkpoint(resolve_source(str(path))) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(make_tensors())
        assert checkpoint.read(NORM).tolist() == [float(counts == 2)] * 5


def test_a_tensor_in_two_shards_without_an_index_that_names_it_is_refused(tmp_path):
    path = write_doubled(tmp_path / "m", 0)
    index_path = path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    del index["weight_map"][NORM]
    index_path.write_text(json.dumps(index))
    with pytest.raises(WeightError, match=rf"{NORM}' twice, and no {index_path.name} says"):
        open_checkpoint(resolve_source(str(path)))
    index_path.unlink()
    for number, shard in enumerate(sorted(path.glob("*.safetensors")), start=1):
        shard.rename(path / f"model-{number:05d}-of-00003.safetensors")
    with pytest.raises(WeightError, match="twice"):
        open_checkpoint(resolve_source(str(path)))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_reading_a_whole_file_keeps_none_of_it_resident(tmp_path):
    tensor_bytes, count = 4 << 20, 40
    tensors = {f"t{i}": torch.full((tensor_bytes // 4,), float(i)) for i in range(count)}
    path = write_model(tmp_path / "m", tensors)
    del tensors
    with open_checkpoint(resolve_source(str(path))) as checkpoint:
        checkpoint.read("t0")
        before = resident_bytes()
        highest = before
        for i in range(count):
            assert checkpoint.read(f"t{i}", "bfloat16")[-1] == i
            highest = max(highest, resident_bytes())
    assert highest - before < 4 * tensor_bytes
