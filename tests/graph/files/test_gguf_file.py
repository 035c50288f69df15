"""GGUF files: values, names, and refusing what is damaged or unknown."""

import json
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter
from support_gguf import HEAD_DIM, TEMPLATE, TOKENS, add_tensor, finish, write_llama

from girih.graph.files import fetch
from girih.graph.files.gguf_convert import _query_scalar
from girih.graph.files.gguf_file import GgufFile, read_gguf_header
from girih.graph.files.sources import resolve_source
from girih.graph.weights.checkpoint import open_checkpoint
from girih.kernels.base.errors import SourceError, WeightError
from girih.kernels.base.progress import no_progress

EMBED = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("quant", [Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0])
def test_reads_every_tensor(tmp_path, quant):
    path = tmp_path / "tiny.gguf"
    expected = write_llama(path, quant)
    file = GgufFile(path)
    assert sorted(file.names()) == sorted(expected)
    for name, values in expected.items():
        assert file.shape(name) == values.shape
        assert torch.equal(file.read(name, "float32"), torch.from_numpy(values)), name
        assert torch.equal(file.read(name, "bfloat16"), torch.from_numpy(values).bfloat16()), name
    file.close()


@pytest.mark.parametrize(
    ("quant", "stored", "read"),
    [
        (Quant.F16, "float16", torch.float16),
        (Quant.BF16, "bfloat16", torch.float32),
        (Quant.Q4_0, "Q4_0", torch.float32),
    ],
)
def test_stored_dtype(tmp_path, quant, stored, read):
    write_llama(tmp_path / "tiny.gguf", quant)
    file = GgufFile(tmp_path / "tiny.gguf")
    assert file.dtype(Q_PROJ) == stored
    expected = torch.bfloat16 if quant == Quant.BF16 else read
    assert file.read(Q_PROJ, None).dtype == expected
    file.close()


def test_many_rows_are_dequantised_in_chunks(tmp_path, monkeypatch):
    expected = write_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(
        "girih.graph.files.gguf_file._CHUNK_VALUES", 64 * 7
    )  # no divisor of the rows
    file = GgufFile(tmp_path / "tiny.gguf")
    assert torch.equal(file.read(EMBED, "float32"), torch.from_numpy(expected[EMBED]))
    file.close()


def write_gemma3(path) -> np.ndarray:
    writer = GGUFWriter(path, "gemma3")
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    weight = np.array([0.0009765, -0.25, 0.5, 1.5], dtype=np.float32)
    for name in ("attn_norm", "attn_q_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", weight + 1)
    add_tensor(writer, "blk.0.attn_q.weight", np.eye(32, dtype=np.float32), Quant.F16)
    finish(writer)
    return weight


def test_gemma_norms_lose_the_stored_offset_before_rounding(tmp_path):
    weight = torch.from_numpy(write_gemma3(tmp_path / "g.gguf"))
    file = GgufFile(tmp_path / "g.gguf")
    norms = {
        "input_layernorm",
        "self_attn.q_norm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    }
    assert set(file.names()) == {f"model.layers.0.{n}.weight" for n in (*norms, "self_attn.q_proj")}
    for norm in norms:
        got = file.read(f"model.layers.0.{norm}.weight", "bfloat16")
        assert torch.equal(got, ((weight + 1) - 1).bfloat16())
        assert got[0] != 0  # 1 + w rounded to bfloat16 first would be exactly 1
    q_proj = file.read("model.layers.0.self_attn.q_proj.weight", "float32")
    assert torch.equal(q_proj, torch.eye(32))  # Gemma's rows are in order
    file.close()


def test_source_keeps_weights_in_the_gguf(tmp_path):
    path = tmp_path / "Tiny Llama.gguf"
    expected = write_llama(path)
    files = resolve_source(str(path))
    assert (files.gguf, files.weights, files.name) == (path, (), "Tiny Llama")
    assert files.dtype == "bfloat16"
    assert not list(files.path.glob("*.safetensors"))
    config = json.loads((files.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, len(TOKENS))
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    generation = json.loads((files.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 1]
    with open_checkpoint(files) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(expected)
        assert checkpoint.dtype(EMBED) == "Q8_0"


def test_source_converts_once_and_follows_the_header(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_llama(path)
    first = resolve_source(str(path)).path
    events = []
    assert resolve_source(str(path), events.append).path == first
    assert events == []
    path.rename(tmp_path / "moved.gguf")
    write_llama(path, pairs={"general.description": "another"})
    assert resolve_source(str(path), events.append).path != first
    assert {event.stage for event in events} == {"convert"}


def test_transformers_loads_the_directory_and_agrees(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = tmp_path / "tiny.gguf"
    write_llama(path)
    files = resolve_source(str(path))
    tokenizer = AutoTokenizer.from_pretrained(files.path)
    assert tokenizer.encode("hello") == [TOKENS.index("hel"), TOKENS.index("lo")]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "he<|turn|>"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.path))
    with open_checkpoint(files) as checkpoint:
        wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert {name: checkpoint.shape(name) for name in checkpoint.names()} == wanted


def test_named_chat_templates_are_kept(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_llama(path, pairs={"tokenizer.chat_template.tool_use": "{{ tools }}"})
    files = resolve_source(str(path)).path
    assert (files / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (files / "chat_template.jinja").read_text() == TEMPLATE


def rope_factors(factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    half = HEAD_DIM // 2
    out = []
    for i in range(half):
        wavelength = 2 * math.pi * 10000.0 ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / high:
            out.append(1.0)
        elif wavelength > 8192 / low:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize(
    ("model_type", "layers", "hidden", "heads", "head_dim", "expected"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3_text", 18, 640, 4, 256, 256),
        ("gemma3_text", 62, 5376, 32, 128, 168),
    ],
)
def test_gemma_attention_scale(model_type, layers, hidden, heads, head_dim, expected):
    config = SimpleNamespace(
        model_type=model_type,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        head_dim=head_dim,
    )
    assert _query_scalar(config) == expected


def test_llama3_rotary_factors_reach_the_config(tmp_path):
    path = tmp_path / "tiny.gguf"
    expected = write_llama(path, extra={"rope_freqs.weight": rope_factors(8.0)})
    files = resolve_source(str(path))
    rope = json.loads((files.path / "config.json").read_text())["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with open_checkpoint(files) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(expected)


def test_other_rotary_factors_of_the_same_header_are_converted_anew(tmp_path):
    path, found = tmp_path / "tiny.gguf", {}
    for factor in (8.0, 32.0):
        write_llama(path, extra={"rope_freqs.weight": rope_factors(factor)})
        config = json.loads((resolve_source(str(path)).path / "config.json").read_text())
        found[factor] = config["rope_parameters"]["factor"]
    assert found == {8.0: 8.0, 32.0: 32.0}


def test_other_rotary_factors_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_llama(path, extra={"rope_freqs.weight": rope_factors(8.0, high=16.0)})
    with pytest.raises(SourceError, match="not Llama 3's"):
        resolve_source(str(path))
    write_llama(path, pairs={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(SourceError, match="'yarn'"):
        resolve_source(str(path))
    assert not [p for p in (tmp_path / "cache" / "gguf").iterdir() if p.is_dir()]


def test_unplaced_tensor_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_llama(path, extra={"blk.0.ssm_a.weight": np.zeros(4, dtype=np.float32)})
    with pytest.raises(WeightError, match=r"blk\.0\.ssm_a\.weight"):
        GgufFile(path)


def test_unknown_architecture_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    finish(writer)
    with pytest.raises(SourceError, match=r"'rwkv7'.*gemma2, gemma3, llama"):
        resolve_source(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [3, 20, 60, 2000, -1])
def test_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "tiny.gguf"
    write_llama(path)
    content = path.read_bytes()
    # The file ends in padding-free tensor bytes, so even one byte less is a loss.
    path.write_bytes(content[:keep])
    with pytest.raises(WeightError, match=r"tiny\.gguf"):
        resolve_source(str(path))


@pytest.mark.parametrize("content", [b"", b"PK\3\4 zip", b"GGUF" + struct.pack("<IQQ", 1, 0, 0)])
def test_not_a_gguf_file(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(WeightError, match=r"x\.gguf"):
        read_gguf_header(tmp_path / "x.gguf")


def test_absurd_counts_end_in_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + struct.pack("<Q", 2**62))
    with pytest.raises(WeightError, match="garbled"):
        read_gguf_header(path)


def header_with(key: str, kind: int, value: bytes) -> bytes:
    """A file without tensors that holds one metadata pair."""
    name = key.encode()
    pair = struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair + bytes(64)


UINT32, STRING, ARRAY = 4, 8, 9


@pytest.mark.parametrize(
    ("kind", "value", "seen"),
    [
        (UINT32, struct.pack("<I", 0), "0"),
        (UINT32, struct.pack("<I", 24), "24"),
        (STRING, struct.pack("<Q", 2) + b"32", "'32'"),
    ],
)
def test_an_alignment_that_is_none_is_refused(tmp_path, kind, value, seen):
    path = tmp_path / "x.gguf"
    path.write_bytes(header_with("general.alignment", UINT32, struct.pack("<I", 64)))
    assert read_gguf_header(path).metadata == {"general.alignment": 64}
    path.write_bytes(header_with("general.alignment", kind, value))
    with pytest.raises(
        WeightError, match=rf"x\.gguf .*general\.alignment is {seen}; .*power of two"
    ):
        read_gguf_header(path)


def test_arrays_nested_without_end_are_refused(tmp_path):
    path = tmp_path / "x.gguf"
    one_array = struct.pack("<IQ", ARRAY, 1)
    path.write_bytes(header_with("k", ARRAY, one_array + struct.pack("<IQB", 0, 1, 7)))
    assert read_gguf_header(path).metadata == {"k": [[7]]}
    path.write_bytes(header_with("k", ARRAY, one_array * 3000))
    with pytest.raises(WeightError, match=r"x\.gguf .*\(k: arrays within arrays, more than 4 deep"):
        read_gguf_header(path)


def load_through_transformers(directory, name):
    from transformers import AutoModelForCausalLM, GgufConfig

    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


def assert_same_bits(files, model):
    with open_checkpoint(files) as checkpoint:
        parameters = dict(model.named_parameters())
        assert set(checkpoint.names()) == set(parameters)
        for name, parameter in parameters.items():
            got = checkpoint.read(name, "bfloat16").view(torch.int16)
            assert torch.equal(got, parameter.detach().view(torch.int16)), name


def test_same_bits_as_transformers(tmp_path):
    write_llama(tmp_path / "tiny.gguf", Quant.Q4_0)
    model = load_through_transformers(tmp_path, "tiny.gguf")
    assert_same_bits(resolve_source(str(tmp_path / "tiny.gguf")), model)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_builtin_models_have_the_same_bits_as_through_transformers(tmp_path, name):
    gguf = fetch.download_gguf(fetch.BUILTIN_MODELS[name], tmp_path, no_progress)
    assert_same_bits(resolve_source(str(gguf)), load_through_transformers(tmp_path, gguf.name))
