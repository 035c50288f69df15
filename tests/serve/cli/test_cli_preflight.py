"""Wrong paths are told at once: one line, exit code, and nothing heavy was imported for it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from girih.kernels.base.errors import ConfigError
from girih.serve.cli.preflight import make_folder, require_readable, require_writable

NO_MODEL = [
    "model=/none/such",
    "model=./none.gguf",
    "model=FILE",
    "model=EMPTY",
    "model=http://x/y",
]
WRONG = [
    *([verb, "prompt=x", wrong] for verb in ("generate",) for wrong in NO_MODEL),
    *(["serve", "port=0", wrong] for wrong in [*NO_MODEL, "bundle=/none/such", "bundle=EMPTY"]),
    *(
        [*verb.split(), "model=/none/such"]
        for verb in (
            "fetch", "chat", "compile", "explain", "check", "passes run", "cache explain",
            "bench offline", "sweep opt=O0",
        )
    ),
    ["generate", "prompt=x", "bundle=/none/such"],
    ["generate", "prompt=x", "model=EMBEDDER"],
    ["chat", "model=EMBEDDER"],
    ["chat", "url=/tmp"],
    ["run-batch", "input=FILE", "output=OUT", "url=ftp://x"],
    ["bench", "serve", "base_url=../x"],
    ["serve", "runtime.trace=/none/such"],
    ["explain", "explain.html=/none/such"],
    ["explain", "opt.dump=FILE"],
    ["passes", "run", "graph=/none/such"],
    ["passes", "diff", "before=/none/a.json", "after=/none/b.json"],
    ["bench", "serve", "report.json=/none/such"],
    ["bench", "serve", "report.records=EMPTY"],
    ["sweep", "opt=O0", "out=FILE"],
    ["run-batch", "input=/none/such", "output=OUT"],
    ["chat", "load=/none/such"],
    ["bench", "offline", "workload_file=/none/such"],
    ["simulate", "cost=/none/such"],
    ["simulate", "fit", "trace=/none/such"],
]  # fmt: skip


def test_wrong_paths_are_one_line_and_import_no_torch(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "embedder").mkdir()
    (tmp_path / "embedder" / "config.json").write_text('{"architectures": ["BertModel"]}')
    save_file({"w": np.zeros(1)}, tmp_path / "embedder" / "model.safetensors")
    places = {"EMPTY": "empty", "FILE": "file", "OUT": "out", "EMBEDDER": "embedder"}
    commands = [
        [
            "=".join(str(tmp_path / places[v]) if v in places else v for v in word.split("="))
            for word in line
        ]
        for line in WRONG
    ]
    code = (
        "import contextlib, io, json, sys\nfrom girih.serve.cli.main import main\n"
        "if __name__ == '__main__':\n"
        f"  for words in {commands!r}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = main(list(words))\n"
        "    heavy = [n for n in ('torch', 'transformers') if n in sys.modules]\n"
        "    print(json.dumps([code, heavy, err.getvalue()]))"
    )
    script = tmp_path / "script.py"  # a core's process imports the main module
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(WRONG)
    for line, (code, heavy, err) in zip(WRONG, answers, strict=True):
        assert (code in (1, 2), heavy) == (True, []), line
        assert err.startswith("girih: "), line
        assert err.count("\n") == 1, (line, err)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path / "missing" / "f", "there is no folder"),
        (lambda path: path, "it is a folder"),
    ],
)
def test_what_cannot_be_written(tmp_path, make, why):
    with pytest.raises(ConfigError, match=f"report.json is .*, which cannot be written: {why}"):
        require_writable("report.json", str(make(tmp_path)))


def test_what_can_be_written(tmp_path):
    require_writable("report.json", None)
    require_writable("report.json", str(tmp_path / "new"))
    assert make_folder("out", str(tmp_path / "a" / "b")).is_dir()


def test_what_cannot_be_read(tmp_path):
    for file, why in ((tmp_path, "it is a folder"), (tmp_path / "none", "there is no such file")):
        with pytest.raises(ConfigError, match=f"graph is .*, which cannot be read: {why}"):
            require_readable("graph", str(file))
    (tmp_path / "f").write_text("")
    require_readable("graph", str(tmp_path / "f"))
