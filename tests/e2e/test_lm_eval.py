"""lm-eval over `/v1/completions` and over transformers: the same log-likelihoods in float32.

lm-eval brings a version of many packages, so it is looked for as a program of its own: `lm_eval` on
PATH, or the one that the variable LM_EVAL names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support_real_server import serving

from girih.graph.files.sources import resolve_source

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(LM_EVAL is None, reason="needs lm-eval (pip install 'lm-eval[api,hf]')"),
]

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " a river", " blue"], 0),
    ("Water boils at a temperature of", [" 100 degrees", " 3 degrees", " Monday"], 0),
    ("def add(a, b):\n    return", [" a + b", " None # nothing", " import os"], 0),
    ("一年有", ["十二个月", "三个月", "一百个月"], 0),
    ("Opposite of hot: ❄️ or 🔥? It is", [" ❄️", " 🔥"], 0),
    ("Two plus two is", [" four", " five", " seventeen and a half"], 0),
    ("She opened the door and", [" walked in.", " purple the of.", " saw nobody there."], 0),
    ("word " * 200 + "and the next is", [" word", " sword"], 0),
]
TASK = """
task: girih_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def write_task(folder: Path) -> None:
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "girih_choice.yaml").write_text(TASK.format(data=data))


def log_likelihoods(folder: Path, model: str, arguments: str) -> list[tuple[float, bool]]:
    """What lm-eval found for every choice: (log-likelihood, whether it is the greedy text)."""
    out = folder / model
    subprocess.run(
        [
            *(str(LM_EVAL), "--model", model, "--model_args", arguments, "--tasks", "girih_choice"),
            *("--include_path", str(folder), "--output_path", str(out), "--log_samples"),
            *("--batch_size", "1", "--device", "cpu"),
        ],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "HF_HOME": str(folder / "hf")},
        timeout=900,
    )
    [samples] = out.rglob("samples_girih_choice_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    return [
        (float(value), str(greedy) == "True") for row in rows for [[value, greedy]] in row["resps"]
    ]


def test_log_likelihoods_equal_transformers(tmp_path):
    write_task(tmp_path)
    path = resolve_source("smollm2").path
    with serving(path, name="smollm2", opt="O2", dtype="float32", threads=0) as url:
        served = log_likelihoods(
            tmp_path,
            "local-completions",
            f"model=smollm2,base_url={url}/v1/completions,tokenizer={path},num_concurrent=2",
        )
    expected = log_likelihoods(tmp_path, "hf", f"pretrained={path},dtype=float32")
    assert len(served) == len(expected) == sum(len(choices) for _, choices, _ in QUESTIONS)
    worst = max(abs(a - b) for (a, _), (b, _) in zip(served, expected, strict=True))
    print(f"{len(served)} log-likelihoods within {worst:.1e} of transformers")
    assert worst < 1e-3
    assert [greedy for _, greedy in served] == [greedy for _, greedy in expected]
