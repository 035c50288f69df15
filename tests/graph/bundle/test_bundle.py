"""Bundles: sealed once, trusted by checksum, found by key."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from girih.graph.bundle.bundle import BundleOrigin, open_bundle, seal
from girih.graph.bundle.files import (
    MANIFEST,
    BundleKey,
    check_files,
    read_key,
    remove_bundle,
    require_bundle,
    tile_graph,
    tile_package,
)
from girih.graph.ir.program import ProgramLayout, TileStep
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.ir.weight_plan import WeightEntry, WeightPlan
from girih.kernels.base.errors import BundleError
from girih.kernels.base.target import Target
from girih.passes.build import build
from girih.passes.build.key import bundle_dir, bundle_key
from girih.passes.options import OptConfig

KEY = BundleKey((("model.dtype", "float32"), ("torch", "2.0")))
LAYOUT = ProgramLayout((TileStep("t0", 0, (0,), (1,)),), {"ids": 0}, {}, 2, 1)
PLAN = WeightPlan([WeightEntry("w", "plain", (2, 2), "float32", ("w",))])
ROWS = VerifyResult("rows", "3 tiles, each token's row beside others and alone", 1e-15, 1e-9, 0.1)


def make_bundle(path, key=KEY):
    (path / "tiles").mkdir(parents=True)
    tile_package(path, "t0").write_bytes(b"code" * 100)
    tile_graph(path, "t0").write_text("{}")
    (path / "kernels.so").write_bytes(b"library")
    save_file({"rope": torch.arange(4.0)}, path / "constants.safetensors")
    description = {
        "layout": LAYOUT.to_json(),
        "weights": PLAN.to_json(),
        "notes": {"t0": "everything"},
        "report": "table",
        "seconds": {"trace": 1.5},
        "verified": [asdict(ROWS)],
    }
    seal(path, key, description)
    return path


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "bundle")


def test_what_was_sealed_is_opened(bundle):
    opened = open_bundle(bundle)
    assert opened.key == KEY
    assert opened.layout == LAYOUT
    assert opened.weights.entries == PLAN.entries
    assert torch.equal(opened.constants["rope"], torch.arange(4.0))
    assert (opened.notes, opened.report, opened.seconds) == (
        {"t0": "everything"},
        "table",
        {"trace": 1.5},
    )
    assert opened.verified == (ROWS,)
    assert opened.package("t0").read_bytes().startswith(b"code")
    assert opened.library.is_file()


def test_a_bundle_may_be_moved(bundle, tmp_path):
    moved = bundle.rename(tmp_path / "elsewhere")
    assert open_bundle(moved).path == moved


FILES = (
    "key.json",
    "program.json",
    "tiles/t0.pt2",
    "tiles/t0.json",
    "constants.safetensors",
    "kernels.so",
)


def test_the_manifest_lists_every_file(bundle):
    assert set(json.loads((bundle / MANIFEST).read_text())) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_named(bundle, name):
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    with pytest.raises(BundleError, match=f"{name} is damaged: SHA-256 .*expected"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", FILES)
def test_altered_file_is_named(bundle, name):
    content = bytearray((bundle / name).read_bytes())
    content[0] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name} is damaged"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(bundle, name):
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"misses {name}"):
        open_bundle(bundle)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "3", "null", "{}"])
def test_unreadable_manifest(bundle, content):
    (bundle / MANIFEST).unlink()
    if content is not None:
        (bundle / MANIFEST).write_text(content)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        open_bundle(bundle)


@pytest.mark.parametrize("content", ["", "{", "3", "[1]", '[["a"]]', "null", '{"a": 1}'])
def test_an_unreadable_key_is_no_key(bundle, content):
    (bundle / "key.json").write_text(content)
    assert read_key(bundle) is None


def test_key_of_a_bundle(bundle, tmp_path):
    assert read_key(bundle) == KEY
    assert read_key(tmp_path / "nowhere") is None


def test_digest_depends_on_every_entry_and_its_order():
    digests = {
        KEY.digest,
        BundleKey((("model.dtype", "bfloat16"), ("torch", "2.0"))).digest,
        BundleKey((("model.dtype", "float32"),)).digest,
        BundleKey(tuple(reversed(KEY.entries))).digest,
    }
    assert len(digests) == 4
    assert BundleKey(KEY.entries).digest == KEY.digest


def test_differences_are_listed_both_ways():
    other = BundleKey((("torch", "2.1"), ("isa", "avx2")))
    assert KEY.differences(other) == [
        "model.dtype: float32 → (absent)",
        "torch: 2.0 → 2.1",
        "isa: (absent) → avx2",
    ]
    assert KEY.differences(KEY) == []


def test_text_of_a_key():
    assert KEY.as_text() == f"key {KEY.digest}\n  model.dtype = float32\n  torch = 2.0\n"


def test_a_removed_bundle_is_gone(bundle):
    remove_bundle(bundle)
    assert not bundle.exists()


class FakeSpec:
    """What the key needs of a model."""

    name = "fake"

    def __init__(self, dtype="float32"):
        self.dtype = dtype

    def key_entries(self):
        return [("dtype", self.dtype)]


TARGET = Target("cpu", "avx2", 2, "g++")


def find(spec, path=None, target=TARGET, opt=None, **place):
    place = build.Place(str(path) if path else None, **place)
    return build.find_or_build(spec, opt or OptConfig(), target, place)


@pytest.fixture
def no_building(monkeypatch):
    """A build fails the test with the reason of the build."""
    monkeypatch.setattr(build, "require_compiler", lambda: None)

    def refuse(self, path):
        raise AssertionError("built")

    monkeypatch.setattr(build._Build, "run", refuse)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached(spec, target=TARGET, opt=None):
    key = bundle_key(spec, opt or OptConfig(), target)
    return make_bundle(bundle_dir() / key.digest, key)


def test_found_in_the_cache_by_key(cache, no_building):
    path = cached(FakeSpec())
    found, how = find(FakeSpec())
    assert (found.path, how) == (path, BundleOrigin("found"))
    assert cache in path.parents


@pytest.mark.parametrize(
    "changed",
    [
        {"spec": FakeSpec("bfloat16")},
        {"spec": FakeSpec(), "target": Target("cpu", "avx512", 2, "g++")},
        {"spec": FakeSpec(), "target": Target("cpu", "avx2", 2, "clang++")},
    ],
    ids=["dtype", "isa", "compiler"],
)
def test_another_key_is_not_found(cache, no_building, changed):
    cached(FakeSpec())
    with pytest.raises(AssertionError, match="built"):
        find(**changed)


def test_a_switched_pass_is_another_key(cache, no_building):
    cached(FakeSpec())
    opt = OptConfig()
    opt.passes.pack_linears.enabled = not opt.passes.pack_linears.enabled
    with pytest.raises(AssertionError, match="built"):
        find(FakeSpec(), opt=opt)


def test_the_level_name_dumps_and_threads_are_no_part_of_the_key(cache, no_building):
    cached(FakeSpec())
    opt = OptConfig(level="mine", dump="somewhere")
    assert find(FakeSpec(), opt=opt, target=Target("cpu", "avx2", 7, "g++"))[1].status == "found"


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_bundle_is_built_again_with_a_warning(cache, no_building, caplog, name):
    path = cached(FakeSpec())
    (path / name).write_bytes(b"x")
    with pytest.raises(AssertionError, match="built"):
        find(FakeSpec())
    [warning] = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert name in warning
    assert "compiling it again" in warning


def test_an_explicit_bundle_is_used(cache, no_building, tmp_path):
    key = bundle_key(FakeSpec(), OptConfig(), TARGET)
    path = make_bundle(tmp_path / "mine", key)
    assert find(FakeSpec(), path)[1].status == "found"


def test_an_explicit_bundle_for_something_else_is_refused(cache, tmp_path):
    key = bundle_key(FakeSpec("bfloat16"), OptConfig(), TARGET)
    path = make_bundle(tmp_path / "mine", key)
    with pytest.raises(BundleError, match=r"model\.dtype: bfloat16 → float32") as caught:
        find(FakeSpec(), path)
    assert "girih compile bundle=DIR" in str(caught.value)


def test_a_directory_that_is_no_bundle_is_never_replaced(cache, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear")
    with pytest.raises(BundleError, match="home is not a bundle"):
        find(FakeSpec(), tmp_path / "home")
    assert (tmp_path / "home" / "diary.txt").read_text() == "dear"


def test_an_explicit_file_is_refused(cache, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(BundleError, match="file is not a"):
        find(FakeSpec(), tmp_path / "file")


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_or_new_directory_is_built_into(cache, no_building, tmp_path, exists):
    if exists:
        (tmp_path / "new").mkdir()
    with pytest.raises(AssertionError, match="built"):
        find(FakeSpec(), tmp_path / "new")


def test_a_cache_that_cannot_be_written_says_what_to_do(monkeypatch, tmp_path, no_building):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "taken"))
    with pytest.raises(BundleError, match="set GIRIH_CACHE_DIR to a writable place"):
        find(FakeSpec())


class TestANamedBundleThatIsMissing:
    def test_the_cached_one_of_the_same_key_is_copied(self, cache, no_building, tmp_path):
        source = cached(FakeSpec())
        found, how = find(FakeSpec(), tmp_path / "out")
        assert (found.path, how) == (tmp_path / "out", BundleOrigin("copied", str(source)))
        assert find(FakeSpec(), tmp_path / "out", may_build=False)[1].status == "found"
        remove_bundle(source)
        check_files(tmp_path / "out")
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["cache", "out"]

    def test_an_empty_directory_is_filled(self, cache, no_building, tmp_path):
        cached(FakeSpec())
        (tmp_path / "out").mkdir()
        assert find(FakeSpec(), tmp_path / "out")[1].status == "copied"

    @pytest.mark.parametrize("name", FILES)
    def test_a_damaged_one_is_not_copied(self, cache, no_building, tmp_path, name):
        (cached(FakeSpec()) / name).write_bytes(b"x")
        with pytest.raises(AssertionError, match="built"):
            find(FakeSpec(), tmp_path / "out")

    def test_one_that_was_not_verified_is_not_copied_where_that_is_wanted(
        self, cache, no_building, tmp_path
    ):
        cached(FakeSpec(), opt=OptConfig(verify=True))
        with pytest.raises(AssertionError, match="built"):
            find(FakeSpec(), tmp_path / "out", opt=OptConfig(verify=True))

    def test_one_of_another_key_is_not_copied(self, cache, no_building, tmp_path):
        cached(FakeSpec("bfloat16"))
        with pytest.raises(AssertionError, match="built"):
            find(FakeSpec(), tmp_path / "out")

    def test_none_is_copied_when_it_is_to_be_compiled(self, cache, no_building, tmp_path):
        cached(FakeSpec())
        with pytest.raises(AssertionError, match="built"):
            find(FakeSpec(), tmp_path / "out", may_copy=False)

    @pytest.mark.parametrize(
        ("make", "seen"),
        [
            (lambda path: None, "there is no bundle at "),
            (lambda path: path.mkdir(), "holds no bundle"),
            (lambda path: path.write_text("a file"), "holds no bundle"),
            (lambda path: (make_bundle(path) / MANIFEST).unlink(), "holds no bundle"),
        ],
    )
    def test_a_start_refuses_it(self, cache, no_building, tmp_path, make, seen):
        cached(FakeSpec())
        make(tmp_path / "out")
        with pytest.raises(BundleError, match=f"{seen}.*bundle_missing=build"):
            find(FakeSpec(), tmp_path / "out", may_build=False)

    def test_a_start_refuses_a_damaged_one(self, cache, no_building, tmp_path):
        path = make_bundle(tmp_path / "out", bundle_key(FakeSpec(), OptConfig(), TARGET))
        (path / "kernels.so").write_bytes(b"x")
        with pytest.raises(BundleError, match=r"kernels\.so is damaged.*bundle_missing=build"):
            find(FakeSpec(), path, may_build=False)

    @pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/b", "a\0b"])
    def test_no_path_is_too_odd_to_be_refused(self, name):
        with pytest.raises(BundleError, match=r"no bundle at|cannot be looked at"):
            require_bundle(name)
