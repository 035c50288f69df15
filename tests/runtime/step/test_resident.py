"""Sleep, wake and new weights of real engines over tiny models (eager pieces)."""

import dataclasses
import gc
import json
import shutil

import pytest
from support_bundles import small_bundle
from support_core import core_of
from support_engines import eager_llm, eager_start
from support_models import tiny_model

from girih import SamplingParams
from girih.graph.bundle.bundle import open_bundle
from girih.graph.bundle.cache import is_in_use, list_bundles
from girih.graph.bundle.files import BundleKey
from girih.graph.ir.verify_result import VerifyResult
from girih.kernels.base.errors import (
    BundleError,
    BusyError,
    EngineError,
    RequestError,
    UnavailableError,
    WeightError,
)
from girih.runtime.start import binding, launch

OPTIONS = {"opt": "O0", "dtype": "float32", "num_blocks": 64, "threads": 1, "max_num_seqs": 4}
PROMPTS = [[5, 6, 7, 8] * 12, [9, 10, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(llm):
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def llm():
    made = eager_llm(tiny_model("llama"), **OPTIONS)
    yield made
    made.close()


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_equal_after_a_sleep(llm, level):
    before = tokens(llm)
    executable = core_of(llm).runner.executable
    llm.sleep(level)
    assert executable.weights() == {}
    assert executable._caches == []
    assert bool(executable._tiles) == (level == 1)
    with pytest.raises(UnavailableError, match=f"level {level}"):
        tokens(llm)
    llm.wake()
    assert tokens(llm) == before
    assert llm.generate(PROMPTS[:1], GREEDY)[0].num_cached_tokens > 0  # of this waking


def test_new_weights_answer_like_a_fresh_start_with_them(llm):
    other = str(tiny_model("llama", seed=1))
    before = tokens(llm)
    fresh = eager_llm(other, **OPTIONS)
    expected = tokens(fresh)
    fresh.close()
    assert expected != before
    llm.reload_weights(other)
    assert tokens(llm) == expected
    llm.sleep()
    llm.wake()  # with the weights it had last
    assert tokens(llm) == expected
    llm.reload_weights(str(tiny_model("llama")))
    assert tokens(llm) == before


def test_another_model_is_refused_and_the_old_weights_serve(llm):
    before = tokens(llm)
    with pytest.raises(RequestError, match=r"another model .*hidden_size: 64 → 96"):
        llm.reload_weights(str(tiny_model("llama", hidden_size=96)))
    with pytest.raises(RequestError, match="path: "):
        llm.reload_weights("/nowhere/at/all")
    assert tokens(llm) == before


def test_whatever_fails_with_new_weights_the_old_ones_serve(llm, monkeypatch):
    before = tokens(llm)

    def fail(weights):
        raise MemoryError("no room for the canary")

    monkeypatch.setattr(core_of(llm).runner.resident, "_check", fail)
    with pytest.raises(EngineError, match="MemoryError: no room for the canary"):
        llm.reload_weights(str(tiny_model("llama", seed=1)))
    assert tokens(llm) == before


def test_damaged_weights_are_refused_and_the_old_ones_serve(llm, tmp_path):
    before = tokens(llm)
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model("llama", seed=1), damaged)
    [file] = damaged.glob("*.safetensors")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n.endswith("mlp.up_proj.weight"))
    header[name]["shape"].reverse()
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    file.write_bytes(data[:8] + text[:size] + data[8 + size :])
    with pytest.raises(RequestError, match=r"cannot be used: tensor .*up_proj.*shape \[64, 96\]"):
        llm.reload_weights(str(damaged))
    assert tokens(llm) == before


def test_a_model_that_went_away_cannot_wake(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), path)
    llm = eager_llm(path, **OPTIONS)
    before = tokens(llm)
    llm.sleep()
    path.rename(tmp_path / "gone")
    with pytest.raises(WeightError):
        llm.wake()
    (tmp_path / "gone").rename(path)
    llm.wake()
    assert tokens(llm) == before
    llm.close()


def test_a_stream_that_was_not_read_to_its_end_is_in_the_way(llm):
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    with pytest.raises(BusyError, match="unfinished"):
        llm.sleep()
    stream.close()
    llm.sleep()
    llm.wake()


def test_a_core_in_another_process_sleeps_too(process_llm):
    before = tokens(process_llm)
    process_llm.sleep(2)
    with pytest.raises(UnavailableError):
        tokens(process_llm)
    process_llm.wake()
    assert tokens(process_llm) == before
    process_llm.reload_weights(str(tiny_model("llama", seed=1)))
    assert tokens(process_llm) != before
    process_llm.reload_weights(str(tiny_model("llama")))
    assert tokens(process_llm) == before


def test_an_engine_holds_its_bundle_until_it_is_closed(tmp_path, monkeypatch):
    """A bundle of a few bytes stands beside the eager pieces; nothing runs its code."""
    monkeypatch.setattr(binding, "verify_canary", lambda *parts: VerifyResult("canary", "nothing"))
    small_bundle(tmp_path, BundleKey((("n", "1"),)))
    [cached] = list_bundles(tmp_path)
    start, program = eager_start(tiny_model("llama"), **OPTIONS)
    with_bundle = dataclasses.replace(program, bundle=open_bundle(cached.path))
    handle = launch.engine_of(start, with_bundle)
    del with_bundle
    gc.collect()
    assert is_in_use(cached)
    handle.core.close()
    assert not is_in_use(cached)


def test_an_engine_that_does_not_start_holds_no_bundle(tmp_path, monkeypatch):
    small_bundle(tmp_path, BundleKey((("n", "1"),)))
    [cached] = list_bundles(tmp_path)
    start, program = eager_start(tiny_model("llama"), **OPTIONS)
    bundle = open_bundle(cached.path)

    def fail(*parts):
        raise BundleError("it answers something else")

    monkeypatch.setattr(binding, "verify_canary", fail)
    with pytest.raises(BundleError, match="something else"):
        launch.engine_of(start, dataclasses.replace(program, bundle=bundle))
    assert not is_in_use(cached)
