"""Compiled engines of a tiny float32 Llama: the tokens of Hugging Face, however they are served.

One process compiles the model and runs every way of serving it; a second one starts from the
bundle alone. Only tokens and counters are compared, so the order of the scenarios is free.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support_models import hf_config, hf_model, tiny_model
from support_scenarios import MAX_TOKENS, run_scenarios

from girih.graph.bundle.bundle import open_bundle

LAYERS = 3
LENGTHS = (1, 2, 7, 16, 17, 33, 48, 61)
OPTIONS = {"max_model_len": 128, "block_size": 16, "num_blocks": 200}


def prompts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 400, (n,), generator=generator).tolist() for n in LENGTHS]


def model_path(seed: int = 0) -> str:
    return str(tiny_model("llama", seed, num_hidden_layers=LAYERS))


def scenario(name, rounds, seed=0, level="O2", **options):
    return {
        "name": name,
        "model": model_path(seed),
        "level": level,
        "options": {**OPTIONS, **options},
        "rounds": rounds,
    }


def scenarios():
    together = [prompts()]
    return [
        # First, so that it finds no bundle where none is kept from an earlier run.
        scenario("while compiling", together, mode="background", enable_prefix_caching=False),
        scenario("together", together),
        scenario("alone", [[p] for p in prompts()], enable_prefix_caching=False),
        scenario("chunked", together, max_num_batched_tokens=16),
        scenario("few at once", together, max_num_seqs=3),
        scenario("warm", [prompts(), prompts()]),
        scenario("preempted", together, num_blocks=14),
        scenario("preempted chunked", together, num_blocks=14, max_num_batched_tokens=24),
        scenario("one block size up", together, block_size=32),
        scenario("captured pieces", together, replay="piecewise"),
        scenario("captured steps", together, replay="full", num_blocks=14),
        scenario("O0", together, level="O0"),
        scenario("other weights", together, seed=1),
    ]


@pytest.fixture(scope="session")
def compiled():
    """(cache directory, answers by scenario name); the bundle is kept for the next run, by key."""
    cache = Path(tempfile.gettempdir()) / f"girih-test-bundles-{os.getuid()}"
    cache.mkdir(exist_ok=True)
    answers = run_scenarios(
        scenarios(),
        GIRIH_CACHE_DIR=str(cache),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
    )
    return cache, answers


@pytest.fixture(scope="session")
def expected():
    """Greedy tokens of Hugging Face, by seed of the weights."""

    def generate(seed):
        model = hf_model(hf_config("llama", num_hidden_layers=LAYERS), seed)
        results = []
        for prompt in prompts():
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            results.append(out[0, len(prompt) :].tolist())
        return results

    return {seed: generate(seed) for seed in (0, 1)}


def test_expected_tokens_vary(expected):
    for sequences in expected.values():
        assert len({tuple(s) for s in sequences}) == len(LENGTHS)
        assert sum(len(set(s)) > 4 for s in sequences) > len(LENGTHS) // 2
    assert expected[0] != expected[1]


@pytest.mark.parametrize(
    "name",
    [
        "together",
        "chunked",
        "few at once",
        "preempted",
        "preempted chunked",
        "one block size up",
        "captured pieces",
        "captured steps",
        "O0",
    ],
)
def test_tokens_are_those_of_hugging_face(compiled, expected, name):
    assert compiled[1][name]["tokens"] == [expected[0]]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_the_other_levels_give_the_same_tokens(compiled, expected, level):
    cache, _ = compiled
    answers = run_scenarios(
        [scenario(level, [prompts()], level=level)],
        GIRIH_CACHE_DIR=str(cache),
        TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
    )
    assert answers[level]["tokens"] == [expected[0]]
    assert answers[level]["key"] != compiled[1]["together"]["key"]


def test_tokens_do_not_change_while_compiled_code_is_taken_in(compiled, expected):
    rounds = compiled[1]["while compiling"]["tokens"]
    assert rounds == [expected[0]] * len(rounds)


def test_one_request_at_a_time(compiled, expected):
    tokens = compiled[1]["alone"]["tokens"]
    assert [t for [t] in tokens] == expected[0]


def test_a_warm_prefix_cache_gives_the_same_tokens(compiled, expected):
    answer = compiled[1]["warm"]
    assert answer["tokens"] == [expected[0]] * 2
    cold, warm = answer["cached"]
    assert cold == [0] * len(LENGTHS)
    assert [n for n, length in zip(warm, LENGTHS, strict=True) if length > 16] == [16, 32, 32, 48]


def test_scenarios_exercise_what_they_are_for(compiled):
    answers = compiled[1]
    assert answers["preempted"]["preemptions"] > 0
    assert answers["preempted chunked"]["preemptions"] > 0
    assert answers["together"]["preemptions"] == 0
    assert answers["chunked"]["steps"] > answers["together"]["steps"]
    assert answers["few at once"]["steps"] > answers["together"]["steps"]


def test_the_first_start_builds_and_the_others_find(compiled):
    answers = dict(compiled[1])
    answers.pop("process")
    assert answers.pop("together")["bundle"] in ("built: no bundle for this key", "found")
    assert answers.pop("O0")["bundle"].startswith("none: O0")
    early = answers.pop("while compiling")["bundle"]
    assert early == "found" or early.startswith("building: ")
    assert {a["bundle"] for a in answers.values()} == {"found"}
    assert {a["attention"] for a in answers.values()} == {f"attention cpu_paged × {LAYERS}"}
    assert len({a["key"] for a in answers.values()}) == 1


def test_nothing_is_compiled_once_an_engine_is_ready(compiled):
    """However requests come: one by one, in batches, in chunks, preempted."""
    answers = dict(compiled[1])
    answers.pop("process")
    assert {name: a["compiled_while_serving"] for name, a in answers.items()} == dict.fromkeys(
        answers, 0
    )


def test_the_build_is_verified_and_every_start_runs_its_canary(compiled):
    cache, answers = compiled
    verified = open_bundle(cache / "bundles" / answers["together"]["key"]).verified
    assert [result.level for result in verified] == ["rows", "passes", "tiles"]
    assert verified[1].compared == "values before and after 4 passes"
    assert verified[2].compared == "3 tiles, compiled and eager"
    assert all(result.passed and result.error < 1e-5 for result in verified)
    canary = {n: answers[n]["verified"][-1] for n in ("together", "warm", "other weights")}
    words = "canary verified: log-probabilities of 12 tokens as "
    assert canary["together"].startswith(words)
    assert canary["warm"].startswith(words + "recorded")
    assert "as eager code, recorded" in canary["other weights"] or (
        "as recorded" in canary["other weights"]  # kept from an earlier run
    )


def test_the_compiler_fuses_what_no_pass_does(compiled):
    """The tile of a layer: residual and norm twice, activation times gate, RoPE; nothing more."""
    cache, answers = compiled
    bundle = open_bundle(cache / "bundles" / answers["together"]["key"])
    (layer,) = [key for key, count in bundle.layout.tile_counts.items() if count == LAYERS - 1]
    with zipfile.ZipFile(bundle.package(layer)) as package:
        sources = [package.read(n).decode() for n in package.namelist() if n.endswith(".cpp")]
    loops = {name for source in sources for name in re.findall(r"cpp_fused_\w+", source)}
    assert len(loops) == 4
    assert sum("add_mean_mul" in name and "rsqrt" in name for name in loops) == 2
    assert sum("silu" in name for name in loops) == 1
    assert sum("cat_mul_neg" in name for name in loops) == 1


def test_other_weights_of_the_same_architecture_use_the_bundle(compiled, expected):
    answer = compiled[1]["other weights"]
    assert answer["bundle"] == "found"
    assert answer["tokens"] == [expected[1]]


def copy_bundle(compiled, directory):
    cache, answers = compiled
    key = answers["together"]["key"]
    return Path(shutil.copytree(cache / "bundles" / key, directory / key))


def test_a_bundle_starts_without_compiler_caches_and_modelling_code(compiled, expected, tmp_path):
    cache = tmp_path / "cache"
    copy_bundle(compiled, cache / "bundles")
    (tmp_path / "bin").mkdir()
    (tmp_path / "inductor").mkdir()
    answers = run_scenarios(
        [scenario("bare", [prompts()])],
        GIRIH_CACHE_DIR=str(cache),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        PATH=str(tmp_path / "bin"),
        CXX="",
    )
    assert answers["bare"]["bundle"] == "found"
    assert answers["bare"]["tokens"] == [expected[0]]
    assert answers["process"] == {"warnings": [], "modeling": []}
    assert list((tmp_path / "inductor").iterdir()) == []


def test_a_bundle_directory_can_be_named_and_moved(compiled, expected, tmp_path):
    moved = copy_bundle(compiled, tmp_path).rename(tmp_path / "moved")
    answers = run_scenarios(
        [scenario("moved", [prompts()], bundle=str(moved))], GIRIH_CACHE_DIR=str(tmp_path / "none")
    )
    assert answers["moved"]["bundle"] == "found"
    assert answers["moved"]["tokens"] == [expected[0]]


@pytest.mark.slow
def test_a_damaged_bundle_is_built_again_with_the_reason(compiled, expected, tmp_path):
    cache = tmp_path / "cache"
    bundle = copy_bundle(compiled, cache / "bundles")
    tile = next((bundle / "tiles").glob("*.pt2"))
    tile.write_bytes(tile.read_bytes()[:-100])
    answers = run_scenarios([scenario("again", [prompts()])], GIRIH_CACHE_DIR=str(cache))
    assert "is damaged" in answers["again"]["bundle"]
    assert answers["again"]["bundle"].startswith("built: ")
    assert answers["again"]["tokens"] == [expected[0]]
    [warning] = answers["process"]["warnings"]
    assert tile.name in warning
    assert "compiling it again" in warning


@pytest.mark.slow
def test_two_processes_build_one_bundle(tmp_path, expected):
    jobs = [[scenario(name, [prompts()])] for name in ("first", "second")]
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(lambda job: run_scenarios(job, GIRIH_CACHE_DIR=str(tmp_path)), jobs)
        )
    found = [answer for both in answers for name, answer in both.items() if name != "process"]
    assert [a["tokens"] for a in found] == [[expected[0]]] * 2
    assert sorted(a["bundle"].split(":")[0] for a in found) == ["built", "found"]
    [bundle] = (p for p in (tmp_path / "bundles").iterdir() if p.is_dir())
    assert json.loads((bundle / "manifest.json").read_text())


LOAD = """
import sys, tempfile
from pathlib import Path
from girih.graph.tiles.inductor import load_tile
from girih.kernels.build.library import load_library
bundle = Path(sys.argv[1])
load_library(bundle / "kernels.so")
for package in (bundle / "tiles").glob("*.pt2"):
    load_tile(package)
print(tempfile.gettempdir())
"""


def can_mount():
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "noexec", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting needs privileges")
def test_a_start_with_a_noexec_temporary_directory(compiled):
    cache, answers = compiled
    bundle = cache / "bundles" / answers["together"]["key"]
    script = 'mount -t tmpfs -o noexec none /mnt && TMPDIR=/mnt exec "$@"'
    command = [sys.executable, "-c", LOAD, str(bundle)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "/mnt"
    assert not list((bundle / "tiles").glob(".run-*"))
