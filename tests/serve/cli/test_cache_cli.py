"""`girih cache`: the verbs on a cache of small bundles and the key of a tiny model."""

import dataclasses

import pytest
from support_bundles import small_bundle
from support_models import tiny_model

from girih.conf.compose import compose_config, to_engine_config
from girih.graph.bundle.files import BundleHold, BundleKey
from girih.runtime.start.wanted import key_of
from girih.serve.cli import main as cli


@pytest.fixture
def girih(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))

    def run(*words):
        capsys.readouterr()  # what making the model wrote
        code = cli.main(["cache", *words, "-q"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def model():
    return f"model={tiny_model('llama')}"


def key(*words):
    return key_of(to_engine_config(compose_config("cache explain", list(words))))


def put(tmp_path, bundle_key, **options):
    return small_bundle(tmp_path / "bundles", bundle_key, **options)


def changed(bundle_key, **values):
    entries = tuple((n, values.get(n.replace(".", "_"), v)) for n, v in bundle_key.entries)
    return BundleKey(entries)


def test_an_empty_cache(girih, model):
    assert girih("list")[1].splitlines()[-1].startswith("0 bundles, 0.0 MiB in ")
    assert girih("explain", model)[1].startswith("miss: no bundle is cached in ")
    assert girih("verify") == (0, "0 bundles, 0 damaged\n")


def test_a_hit_is_named(girih, model, tmp_path):
    path = put(tmp_path, key(model), used_ago=7200)
    assert girih("explain", model)[1] == f"hit: {path}, built for tiny, used 2 h ago\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"target_isa": "avx999"}, "target.isa: avx999 → "),
        ({"torch": "1.0"}, "torch: 1.0 → "),
        ({"girih_compiler": "another"}, "girih.compiler: another → "),
        ({"opt_pack_linears": "False"}, "opt.pack_linears: False → True"),
        ({"model_config.rms_norm_eps": "1.0"}, ""),
    ],
)
def test_a_miss_names_the_entry(girih, model, tmp_path, values, line):
    if not line:
        values, line = {}, "model.config.rms_norm_eps: 1.0 → 1e-06"
        entries = key(model).entries
        name = "model.config.rms_norm_eps"
        other = BundleKey(tuple((n, "1.0" if n == name else v) for n, v in entries))
    else:
        other = changed(key(model), **values)
    put(tmp_path, other)
    code, out = girih("explain", model)
    assert code == 0
    assert out.startswith(f"miss: the nearest bundle, {other.digest} of tiny, differs in 1 of ")
    assert out.splitlines()[1].strip().startswith(line)
    assert len(out.splitlines()) == 2


def test_runtime_options_and_weights_never_miss(girih, model, tmp_path):
    put(tmp_path, key(model))
    fine_tune = f"model={tiny_model('llama', seed=1)}"
    for words in (
        ("max_num_seqs=3", "scheduler.max_num_batched_tokens=64", "num_blocks=77"),
        ("cache.block_size=16", "cache.enable_prefix_caching=false", "max_model_len=64"),
        ("threads=1", "opt.verify=true", "opt.strict=true", "compile.cache_gib=1"),
    ):
        assert girih("explain", model, *words)[1].startswith("hit: ")
        assert girih("explain", fine_tune, *words)[1].startswith("hit: ")
    assert girih("explain", model, "opt=O3")[1].startswith("miss: ")


def test_versions_share_a_cache_without_harm(girih, model, tmp_path):
    """Another version's bundle has another key, whatever its program looks like."""
    mine = put(tmp_path, key(model))
    theirs = put(tmp_path, changed(key(model), girih_compiler="other"), used_ago=60)
    (theirs / "program.json").write_text('{"format": 2}')
    assert girih("explain", model)[1].startswith(f"hit: {mine}")
    assert girih("list")[1].count("\n") == 4
    code, out = girih("verify")
    assert code == 1
    assert f"{theirs.name} ?: bundle file" in out
    assert f"{mine.name} tiny: sound" in out


def test_pruning_to_a_bound(girih, tmp_path):
    for number in range(3):
        put(tmp_path, BundleKey((("n", str(number)),)), size=1 << 20, used_ago=number * 100)
    code, out = girih("prune", "max_gib=0.0025")
    assert code == 0
    assert out.splitlines()[-1].startswith("1 bundles removed, 1.0 MiB freed")
    assert girih("list")[1].splitlines()[-1].startswith("2 bundles")
    assert girih("prune", "max_gib=-1")[0] == 2
    assert girih("prune", "max_gib=0")[1].startswith("removed ")
    assert girih("list")[1].splitlines()[-1].startswith("0 bundles")


def test_pruning_names_what_engines_use(girih, tmp_path):
    path = put(tmp_path, BundleKey((("n", "1"),)), model="busy")
    put(tmp_path, BundleKey((("n", "2"),)))
    hold = BundleHold(path)
    code, out = girih("prune", "max_gib=0")
    assert code == 0
    assert f"kept {path} (busy): an engine that runs uses it\n1 bundles removed" in out
    assert "kept" not in girih("prune", "max_gib=1")[1]
    hold.release()
    assert "kept" not in girih("prune", "max_gib=0")[1]
    assert not path.exists()


def test_keys_hold_no_runtime_option(model):
    names = {n for n, _ in key(model).entries}
    config = to_engine_config(compose_config("compile", [model]))
    for section in ("scheduler", "cache", "runtime", "compile"):
        for field in dataclasses.fields(getattr(config, section)):
            assert not any(name.endswith(field.name) for name in names), field.name
