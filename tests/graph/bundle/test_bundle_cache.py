"""The cache of bundles: listing, what made a miss, pruning by last use, rubbish, checksums."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from filelock import FileLock
from support_bundles import small_bundle

from girih.graph.bundle import cache as bundle_cache
from girih.graph.bundle.bundle import open_bundle
from girih.graph.bundle.cache import (
    is_in_use,
    list_bundles,
    mark_used,
    nearest_bundle,
    prune,
    verify,
)
from girih.graph.bundle.files import BundleKey, remove_bundle, unused
from girih.kernels.base.errors import BundleError


def key(**entries):
    return BundleKey((("model.dtype", "float32"), *entries.items()))


@pytest.fixture
def cache(tmp_path):
    """Three bundles of about 20 kB, used 3, 2 and 1 hours ago."""
    for hours, name in ((3, "old"), (1, "new"), (2, "middle")):
        small_bundle(tmp_path, key(name=name), 20_000, hours * 3600, model=name)
    return tmp_path


def models(bundles):
    return [b.model for b in bundles]


def test_bundles_are_listed_by_last_use(cache):
    bundles = list_bundles(cache)
    assert models(bundles) == ["new", "middle", "old"]
    assert all(20_000 < b.num_bytes < 30_000 for b in bundles)
    assert bundles[0].entry("name") == "new"
    assert bundles[0].entry("nothing") == ""


def test_using_a_bundle_moves_it_to_the_front(cache):
    oldest = list_bundles(cache)[-1]
    mark_used(oldest.path)
    assert models(list_bundles(cache))[0] == "old"


def test_what_is_no_bundle_is_not_listed(cache):
    (cache / "half").mkdir()
    (cache / "half" / "key.json").write_text("[]")
    (cache / "other").mkdir()
    (cache / "file").write_text("")
    assert len(list_bundles(cache)) == 3
    assert list_bundles(cache / "missing") == []


def test_the_nearest_bundle_differs_in_the_fewest_entries(cache):
    wanted = key(name="new", isa="avx512")
    assert nearest_bundle(cache, wanted).model == "new"
    assert nearest_bundle(cache, wanted).key.differences(wanted) == ["isa: (absent) → avx512"]
    assert nearest_bundle(cache / "missing", wanted) is None


@pytest.mark.parametrize(("kib", "left"), [(100, 3), (50, 2), (30, 1), (0, 0)])
def test_pruning_removes_what_was_used_longest_ago(cache, kib, left):
    removed = prune(cache, kib * 1024)
    assert models(removed) == ["old", "middle", "new"][: 3 - left]
    assert models(list_bundles(cache)) == ["new", "middle", "old"][:left]


def test_what_was_prepared_for_another_machine_is_pruned_like_the_others(cache):
    path = cache / "abc.prepared"
    (path / "tiles").mkdir(parents=True)
    (path / "key.json").write_text(
        json.dumps([["target.device", "cuda"], ["target.arch", "sm_90"]])
    )
    (path / "prepared.json").write_text(json.dumps({"model": "far"}))
    (path / "tiles" / "t0.json").write_bytes(b"x" * 20_000)
    os.utime(path / "prepared.json", (time.time() - 5 * 3600,) * 2)
    assert models(list_bundles(cache)) == ["new", "middle", "old"]
    everything = list_bundles(cache, prepared=True)
    assert models(everything) == ["new", "middle", "old", "far"]
    assert [b.is_prepared for b in everything] == [False, False, False, True]
    assert nearest_bundle(cache, everything[-1].key).model != "far"
    assert [fault for _, fault in verify(cache)] == [None] * 3
    assert models(prune(cache, 80 * 1024)) == ["far"]
    assert not path.exists()


def test_pruning_keeps_what_it_is_told_and_what_is_being_built(cache):
    paths = {b.model: b.path for b in list_bundles(cache)}
    with FileLock(cache / f".{paths['middle'].name}.lock"):
        removed = prune(cache, 0, keep=paths["new"])
    assert models(removed) == ["old"]
    assert sorted(models(list_bundles(cache))) == ["middle", "new"]


@pytest.mark.parametrize("moment", ["read_key", "_model"])
def test_a_bundle_that_another_process_removes_meanwhile_is_not_in_the_way(
    cache, monkeypatch, moment
):
    """It goes right after its key was read, or before its size is counted."""
    found = getattr(bundle_cache, moment)

    def read(path):
        value = found(path)
        if value == "middle" or (moment == "read_key" and dict(value.entries)["name"] == "middle"):
            remove_bundle(path if path.is_dir() else path.parent)
        return value

    monkeypatch.setattr(bundle_cache, moment, read)
    sizes = {b.model: b.num_bytes for b in list_bundles(cache)}
    assert {name for name, size in sizes.items() if size} == {"new", "old"}
    assert sizes.get("middle", 0) == 0
    assert models(prune(cache, 0)) == ["old", "new"]


def test_what_vanishes_while_it_is_counted_has_no_bytes(cache, monkeypatch):
    path = list_bundles(cache)[0].path
    walk = os.walk

    def vanishing(top):
        for folder, folders, names in walk(top):
            if folder.endswith("tiles"):
                shutil.rmtree(folder)
            yield folder, folders, names

    monkeypatch.setattr(bundle_cache.os, "walk", vanishing)
    assert 0 < bundle_cache._size(path) < 20_000


def test_what_cannot_be_removed_stays(cache, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bundle_cache, "remove_bundle", refuse)
    assert prune(cache, 0) == []
    assert len(list_bundles(cache)) == 3


def test_pruning_keeps_what_is_in_use_here(cache):
    oldest = list_bundles(cache)[-1]
    first, second = open_bundle(oldest.path), open_bundle(oldest.path)
    assert [is_in_use(b) for b in list_bundles(cache)] == [False, False, True]
    assert models(prune(cache, 0)) == ["middle", "new"]
    first.release()
    first.release()
    assert prune(cache, 0) == []
    del second  # nobody released it
    assert not is_in_use(oldest)
    assert models(prune(cache, 0)) == ["old"]


def test_a_process_that_dies_lets_go_of_its_bundle(cache):
    oldest = list_bundles(cache)[-1]
    code = (
        "import sys, time; from pathlib import Path;"
        "from girih.graph.bundle.files import BundleHold;"
        "hold = BundleHold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(oldest.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert is_in_use(oldest)
        assert models(prune(cache, 0)) == ["middle", "new"]
    finally:
        holder.kill()
        holder.communicate()
    assert models(prune(cache, 0)) == ["old"]


def test_opening_waits_for_a_removal_and_finds_nothing(cache):
    path, errors = list_bundles(cache)[0].path, []

    def open_it():
        try:
            open_bundle(path)
        except BundleError as error:
            errors.append(str(error))

    opener = threading.Thread(target=open_it)
    with unused(path) as is_free:
        assert is_free
        opener.start()
        opener.join(0.2)
        assert opener.is_alive()
        remove_bundle(path)
    opener.join(10)
    assert len(errors) == 1
    assert "has no readable manifest.json" in errors[0]


def test_a_bundle_that_cannot_be_written_is_held_too(cache):
    path = list_bundles(cache)[0].path
    for entry in (path / "manifest.json", path, cache):
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    try:
        bundle = open_bundle(path)
        assert is_in_use(list_bundles(cache)[0])
        bundle.release()
        assert not is_in_use(list_bundles(cache)[0])
    finally:
        for entry in (cache, path):
            entry.chmod(0o755)


def test_rubbish_of_killed_builds_goes_when_it_is_old(cache):
    for name, age in (("young", 10.0), ("old", 2 * bundle_cache.ABANDONED_SECONDS)):
        work = cache / f".{name}-abc"
        work.mkdir()
        (work / "tile").write_text("")
        os.utime(work, (time.time() - age,) * 2)
    prune(cache, 1 << 30)
    assert (cache / ".young-abc").exists()
    assert not (cache / ".old-abc").exists()
    assert len(list_bundles(cache)) == 3


def test_verifying_reads_every_file(cache):
    assert [fault for _, fault in verify(cache)] == [None] * 3
    damaged = list_bundles(cache)[1].path / "tiles" / "t0.pt2"
    damaged.write_bytes(b"y" + damaged.read_bytes()[1:])
    faults = {b.model: fault for b, fault in verify(cache)}
    assert "t0.pt2 is damaged" in faults["middle"]
    assert faults["new"] is None


def test_a_cache_that_cannot_be_written_is_still_read(cache, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bundle_cache.Path, "touch", refuse)
    mark_used(list_bundles(cache)[0].path)
    assert len(list_bundles(cache)) == 3
