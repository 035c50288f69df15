"""Finding and building: what a key holds, and that a bundle is built once."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_models import opt_o2, tiny_spec

from girih.kernels.base.errors import BundleError, CompileError, ConfigError
from girih.kernels.base.progress import no_progress
from girih.kernels.base.target import Target
from girih.passes.build import build, key
from girih.passes.build.background import BuildObserver
from girih.passes.options import OptConfig
from girih.passes.pipeline import PIPELINE

TARGET = Target("cpu", "avx2", 2, "g++")


def entries(spec, opt=None, target=TARGET):
    return dict(key.bundle_key(spec, opt or opt_o2(), target).entries)


def test_a_key_names_everything_that_decides_code():
    names = set(entries(tiny_spec("llama")))
    assert {f"opt.{name}" for name in PIPELINE} <= names
    assert {
        "model.dtype",
        "model.config.hidden_size",
        "target.isa",
        "target.compiler",
        "torch",
        "transformers",
        "girih.kernels",
        "girih.compiler",
        "inductor.cpp.simdlen",
    } <= names


def test_a_fine_tune_has_the_same_key():
    assert entries(tiny_spec("llama")) == entries(tiny_spec("llama", seed=1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rms_norm_eps": 1e-5}, "model.config.rms_norm_eps"),
        ({"num_hidden_layers": 3}, "model.config.num_hidden_layers"),
        ({"dtype": "bfloat16"}, "model.dtype"),
    ],
)
def test_another_model_has_another_key(changes, name):
    one, other = entries(tiny_spec("llama")), entries(tiny_spec("llama", **changes))
    assert name in {n for n in {*one, *other} if one.get(n) != other.get(n)}


def test_the_digest_of_the_compiler_covers_every_deciding_file(monkeypatch, tmp_path):
    root = tmp_path / "girih"
    names = [str(path.relative_to(key.ROOT)) for path in key.deciding_files()]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((key.ROOT / name).read_bytes())
    unchanged = key.compiler_digest()
    monkeypatch.setattr(key, "ROOT", root)
    assert key.compiler_digest() == unchanged
    for name in names:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content + b"\n# more\n")
        assert key.compiler_digest() != unchanged, name
        (root / name).write_bytes(content)


# What stages between a model and its bundle import, and why it does not decide the code.
INDIFFERENT = {
    "kernels/base/cache_dir.py": "places",
    "kernels/base/choices.py": "checks settings",
    "graph/weights/checkpoint.py": "weights are inputs; conversions see names and shapes only",
    "graph/files/fetch.py": "downloads",
    "graph/files/gguf_convert.py": "makes a configuration, and that is in the key",
    "graph/files/gguf_file.py": "reads weights",
    "graph/files/gguf_names.py": "names of weights",
    "kernels/base/progress.py": "reports",
    "graph/files/safetensors_file.py": "reads weights",
    "graph/files/sources.py": "places",
    "graph/weights/load.py": "fills weights as the plan says",
    "kernels/base/errors.py": "errors",
    "kernels/build/library.py": "its sources and flags are in the key",
    "kernels/build/sources.py": "its sources and flags are in the key",
    "kernels/base/target.py": "its values are in the key",
}


def test_every_file_that_could_decide_is_in_the_digest_or_exempt():
    stages = ["trace/trace", "partition/partition", "tiles/inductor", "tiles/worker"]
    pending = [*(f"graph/{s}.py" for s in stages), "passes/runner.py", "passes/pipeline.py"]
    seen = set()
    while pending:
        file = pending.pop()
        if file not in seen:
            seen.add(file)
            pending += own_imports(file)
    undecided = seen - {str(path.relative_to(key.ROOT)) for path in key.deciding_files()}
    assert undecided == set(INDIFFERENT)


def own_imports(file):
    """Files of girih that a file imports, in functions too."""
    for node in ast.walk(ast.parse((key.ROOT / file).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        for name in names:
            path = "/".join(name.split(".")[1:]) + ".py"
            if name.startswith("girih.") and (key.ROOT / path).exists():
                yield path


def test_nothing_is_built_where_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="opt=O0 compiles nothing"):
        build.find_or_build(tiny_spec("llama"), OptConfig("O0", compile=False), TARGET)


def test_a_missing_compiler_is_said_before_anything_is_done(monkeypatch, tmp_path):
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        build.find_or_build(tiny_spec("llama"), opt_o2(), TARGET)
    assert not (tmp_path / "cache").exists()


class Fails(build._Build):
    """A build that cannot go on."""

    def _front(self):
        raise OSError(28, "No space left on device")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """No compiling processes and no kernel library."""

    class NoPool:
        def __init__(self, workers):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(build, "CompilePool", NoPool)
    monkeypatch.setattr(build._Build, "_build_library", lambda self, path: None)
    monkeypatch.setattr(build, "require_compiler", lambda: None)
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_full_disk_leaves_nothing_behind(monkeypatch, quick):
    monkeypatch.setattr(build, "_Build", Fails)
    with pytest.raises(BundleError, match=r"No space left on device.*free space"):
        build.find_or_build(tiny_spec("llama"), opt_o2(), TARGET)
    assert [p for p in (quick / "bundles").iterdir() if p.is_dir()] == []


def test_another_error_leaves_nothing_behind(monkeypatch, quick):
    def fails(self):
        raise CompileError("no")

    monkeypatch.setattr(build._Build, "_front", fails)
    with pytest.raises(CompileError, match="no"):
        build.find_or_build(tiny_spec("llama"), opt_o2(), TARGET)
    assert [p for p in (quick / "bundles").iterdir() if p.is_dir()] == []


def test_what_the_tiles_showed_is_kept(quick):
    spec = tiny_spec("llama")
    key = build.bundle_key(spec, opt_o2(), TARGET)
    made = build._Build(spec, opt_o2(), TARGET, key, no_progress, build.BuildObserver())
    lowered, program = made._front()
    description = made._description(lowered, program, program.verified)
    assert description["verified"][0]["compared"].startswith("3 tiles, each token's row")
    assert {"trace", "lower", "rows"} <= set(description["seconds"])
    assert all(seconds > 0 for seconds in description["seconds"].values())


RACE = """
import sys, time
import torch
from safetensors.torch import save_file
from girih.graph.bundle.bundle import seal
from girih.graph.ir.program import ProgramLayout
from girih.graph.files.spec import load_spec
from girih.kernels.base.target import Target
from girih.passes.build import build
from girih.passes.options import OptConfig

def run(self, path):
    print("building", flush=True)
    time.sleep(1)
    path.mkdir()
    save_file({"x": torch.zeros(1)}, path / "constants.safetensors")
    (path / "kernels.so").write_bytes(b"")
    rest = {"weights": [], "notes": {}, "report": "", "seconds": {}}
    seal(path, self.key, {"layout": ProgramLayout((), {}, {}, 0, 0).to_json(), **rest})

build._Build.run = run
build.require_compiler = lambda: None
spec = load_spec(sys.argv[1])
input()
print(build.find_or_build(spec, OptConfig(), Target("cpu", "avx2", 2, "g++"))[1].as_text())
"""


class Waiting(BuildObserver):
    """Looks, when the model is split, which compilers were started by then."""

    def __init__(self, waits, started):
        self.waits_for_split, self.started, self.seen = waits, started, None

    def split(self, program):
        self.seen = list(self.started)


@pytest.mark.parametrize("waits", [True, False])
def test_compilers_start_after_a_split_that_somebody_waits_for(waits, tmp_path, monkeypatch):
    started = []

    def no_pool(at_once):
        started.append(at_once)
        raise CompileError("no compilers here")

    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "CompilePool", no_pool)
    watcher = Waiting(waits, started)
    with pytest.raises(CompileError, match="no compilers here"):
        build.find_or_build(tiny_spec("llama"), opt_o2(), TARGET, observer=watcher)
    assert started
    assert watcher.seen == ([] if waits else None)  # the others start before anything is traced


def test_two_processes_build_once(tmp_path):
    model = str(tiny_spec("llama").files.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, model],
            env={**os.environ, "GIRIH_CACHE_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(tmp_path),
        )
        for _ in range(2)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [p.communicate(timeout=120)[0].split("\n") for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    words = [line for lines in answers for line in lines if line]
    assert words.count("building") == 1
    assert sorted(w for w in words if w != "building") == ["built: no bundle for this key", "found"]
