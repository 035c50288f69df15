"""Profiles of a real engine: torch's operations and the core's steps on one clock."""

import json
from pathlib import Path

import pytest
from support_core import core_of
from support_engines import eager_llm
from support_models import tiny_model

from girih import SamplingParams
from girih.kernels.base.errors import BusyError, RequestError
from girih.runtime.client.control import call_method

OPTIONS = {"opt": "O0", "dtype": "float32", "num_blocks": 64, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_a_trace_holds_steps_and_what_ran_in_them(tmp_path):
    folder = tmp_path / "traces"
    llm = eager_llm(tiny_model("llama"), profile_dir=str(folder), **OPTIONS)
    core = core_of(llm)
    llm.generate([[5, 6, 7]], GREEDY)
    assert not folder.exists()
    call_method(core, "profile_start", {})
    with pytest.raises(BusyError, match="runs already"):
        call_method(core, "profile_start", {})
    llm.generate([[8, 9, 10]], GREEDY)
    file = call_method(core, "profile_stop", {})
    with pytest.raises(BusyError, match="start it first"):
        call_method(core, "profile_stop", {})
    llm.generate([[5, 6, 7]], GREEDY)
    llm.close()
    events = json.loads(Path(file).read_text())["traceEvents"]
    runs = [e for e in events if e["name"] == "run" and e.get("ph") == "X"]
    assert len(runs) == 5  # the prompt and four decode steps; none from before or after
    matmuls = [e for e in events if e["name"] == "aten::linear"]
    inside = [
        any(r["ts"] - 200 <= m["ts"] <= r["ts"] + r["dur"] + 200 for r in runs) for m in matmuls
    ]
    assert sum(inside) == len(inside) > 20
    assert {p.name for p in folder.iterdir()} == {file.rpartition("/")[2]}


def test_without_a_folder_nothing_is_profiled():
    llm = eager_llm(tiny_model("llama"), **OPTIONS)
    with pytest.raises(RequestError, match=r"runtime\.profile_dir=DIR"):
        call_method(core_of(llm), "profile_start", {})
    llm.close()
