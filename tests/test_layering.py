"""Who may import whom, and that nothing is imported twice or too early."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "graph", "passes", "runtime", "serve")
FOLDERS = (*LAYERS, "conf")
SOURCES = sorted(
    p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts
)


@functools.cache
def imports(path):
    """Dotted names that a file imports, those in functions included; `import_module` too."""
    return tuple(_imports(path))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(prefix):
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name == prefix or name.startswith(prefix + ".") for name in imports(path))
    }


def test_there_are_sources():
    assert {p.relative_to(ROOT).parts[0] for p in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_left(layer):
    right = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = {
        (file, other)
        for other in (*right, "conf")
        for file in importers(f"girih.{other}")
        if file.startswith(f"{layer}/")
    }
    if layer == "serve":  # the command line reads conf
        wrong = {(f, o) for f, o in wrong if not reads_configuration(f)}
    assert wrong == set()


def reads_configuration(file):
    name = file.removeprefix("serve/")
    return name.startswith(("cli", "commands/")) or name in ("config.py", "options.py")


def test_one_file_touches_inductor():
    assert importers("torch._inductor") == {"graph/tiles/inductor.py"}
    named = {str(p.relative_to(ROOT)) for p in SOURCES if '"torch._inductor' in p.read_text()}
    assert named <= {"graph/tiles/worker.py"}


def test_one_file_touches_transformers_models():
    users = {f for f in importers("transformers") if f.startswith(LAYERS[:4])}
    assert {f for f in users if not f.startswith("graph/")} == set()
    assert "graph/trace/trace.py" in users


def test_hydra_stays_in_configuration():
    users = importers("hydra") | importers("omegaconf")
    assert users
    assert {f for f in users if not f.startswith(("conf/", "serve/cli", "serve/commands"))} == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_bare_imports(folder):
    assert importers(folder) == set()


OPTIONAL = ("xgrammar",)  # packages of an extra; one module each imports them
EVERYTHING = """
import importlib, pkgutil, sys
import girih
for folder in {folders}:
    package = importlib.import_module("girih." + folder)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in {optional}:
                raise
print(sorted(n for n in sys.modules if n.split(".")[0] in {folders}))
print(len([n for n in sys.modules if n.startswith("girih.")]))
"""


def run(program, cwd):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_no_module_exists_twice(tmp_path):
    twice, count = run(EVERYTHING.format(folders=FOLDERS, optional=OPTIONAL), tmp_path)
    assert twice == "[]"
    assert int(count) >= len([p for p in SOURCES if p.name != "__init__.py"]) - 1 - len(OPTIONAL)


TORCH_FREE = (
    "girih.runtime.schedule.scheduler",
    "girih.runtime.records.config",
    "girih.passes.options",
    "girih.passes.pipeline",
    "girih.passes.build.key",
    "girih.graph.bundle.cache",
    "girih.runtime.start.wanted",
    "girih.graph.files.spec",
    "girih.graph.files.sources",
    "girih.serve.cli.main",
)
HEAVY = ("torch", "transformers", "numpy", "hydra")


def test_light_modules_stay_light(tmp_path):
    code = (
        "import importlib, sys\n"
        f"for module in {TORCH_FREE}:\n"
        "    importlib.import_module(module)\n"
        f"    print(module, [n for n in {HEAVY} if n in sys.modules])"
    )
    assert run(code, tmp_path) == [f"{module} []" for module in TORCH_FREE]
