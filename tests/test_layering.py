"""Who may import whom, and that nothing is imported twice or too early."""

import ast
import functools
import subprocess
import sys
import tomllib
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
    """Dotted names that a file imports, those in functions included."""
    return tuple(_imports(ast.walk(ast.parse(path.read_text())), path))


@functools.cache
def running_imports(path):
    """As `imports`, without those that only type checkers see."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    typing = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    unseen = {id(node) for block in typing for node in ast.walk(block)}
    return tuple(_imports((n for n in nodes if id(n) not in unseen), path))


def _imports(nodes, path):
    for node in nodes:
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


# Each folder with modules of its own, and the folders it may import. `kernels.base` may be imported
# from everywhere, and a folder may import itself; nothing else is allowed.
ARROWS = {
    "kernels.base": "",
    "kernels.kv": "",
    "kernels.ops": "kernels.kv",
    "kernels.build": "kernels.ops",
    "kernels.attention": "kernels.build kernels.kv kernels.ops",
    "kernels": "kernels.build kernels.kv kernels.ops",
    "graph.files": "",
    "graph.ir": "kernels.attention kernels.ops",
    "graph.weights": "graph.files graph.ir kernels.ops",
    "graph.adapt": "kernels.ops",
    "graph.tiles": "graph.ir kernels.build kernels.ops",
    "graph.trace": "graph.adapt graph.files graph.ir graph.tiles graph.weights kernels.ops",
    "graph.partition": "graph.ir graph.trace kernels.attention",
    "graph.bundle": "graph.ir",
    "graph.execute": "graph.ir graph.tiles kernels.attention kernels.kv kernels.ops",
    "passes.verify": "graph.ir graph.partition graph.tiles graph.trace graph.weights kernels.build "
    "kernels.ops",
    "passes": "graph.ir graph.partition graph.trace passes.verify",
    "passes.rewrites": "graph.ir kernels.ops passes",
    "passes.build": "graph.bundle graph.execute graph.files graph.ir graph.partition graph.tiles "
    "graph.trace kernels.build passes passes.verify",
    "runtime": "",
    "runtime.records": "passes",
    "runtime.sample": "runtime.records",
    "runtime.structured": "runtime.records",
    "runtime.schedule": "kernels.kv runtime.records",
    "runtime.step": "graph.execute graph.files graph.tiles kernels.attention runtime.records "
    "runtime.sample runtime.structured",
    "runtime.engine": "runtime.records runtime.schedule runtime.step",
    "runtime.observe": "runtime.engine runtime.records runtime.schedule runtime.step",
    "runtime.client": "runtime.engine runtime.observe runtime.records",
    "runtime.verify": "graph.bundle graph.execute graph.ir graph.tiles kernels.attention",
    "runtime.start": "graph.bundle graph.execute graph.files graph.ir graph.partition graph.tiles "
    "graph.trace graph.weights kernels.build kernels.kv passes.build runtime.engine "
    "runtime.observe runtime.records runtime.sample runtime.schedule runtime.step "
    "runtime.structured runtime.verify",
    "runtime.inspect": "graph.bundle graph.execute graph.files graph.ir graph.partition "
    "graph.tiles graph.trace graph.weights kernels kernels.build passes passes.build "
    "runtime.records runtime.schedule runtime.start runtime.verify",
    "serve.web": "",
    "serve.text.parsers": "runtime.structured",
    "serve": "serve.text.parsers",
    "serve.text": "runtime.records runtime.structured serve serve.text.parsers",
    "serve.engine": "runtime runtime.client runtime.engine runtime.observe runtime.records "
    "runtime.start serve serve.text",
    "serve.http.base": "runtime.records serve serve.engine serve.text serve.web",
    "serve.http.generation": "runtime.records runtime.structured serve serve.engine "
    "serve.http.base serve.text serve.text.parsers",
    "serve.http.openai": "runtime.records serve serve.http.base serve.http.generation serve.text "
    "serve.text.parsers",
    "serve.http.responses": "serve serve.http.base serve.http.generation serve.text.parsers",
    "serve.http.anthropic": "serve.http.base serve.http.generation serve.text.parsers",
    "serve.http.pooling": "runtime.records serve.http.base serve.http.generation serve.text",
    "serve.http.admin": "graph.files runtime.records serve.engine serve.http.base "
    "serve.http.generation serve.text serve.web",
    "serve.chat": "serve serve.text",
    "serve.bench": "runtime.records runtime.schedule serve",
    "serve.twin": "kernels.kv runtime.client runtime.engine runtime.observe runtime.records "
    "runtime.schedule serve.bench",
    "conf": "passes runtime.records serve serve.bench serve.twin",
    "serve.cli": "conf graph.bundle graph.files runtime.records serve.text",
    "serve.http": "graph.files runtime.client runtime.records serve serve.engine serve.http.admin "
    "serve.http.anthropic serve.http.base serve.http.generation serve.http.openai "
    "serve.http.pooling serve.http.responses serve.text serve.web",
    "serve.offline": "conf passes runtime.client runtime.records runtime.start "
    "runtime.structured serve serve.engine serve.text",
    "serve.cli.commands": "conf graph.bundle graph.files graph.partition passes passes.build "
    "passes.verify runtime.client runtime.inspect runtime.records runtime.start serve serve.bench "
    "serve.chat serve.cli serve.http serve.offline serve.text serve.twin",
}


def folder_of(module):
    """The folder, dotted, that holds a module of girih; of a package: itself."""
    path = ROOT / module.replace(".", "/")
    return module if path.is_dir() else module.rpartition(".")[0]


def arrows():
    """Folder -> {folder that one of its files imports: that file}."""
    found = {}
    for path in SOURCES:
        folder = ".".join(path.relative_to(ROOT).parts[:-1])
        targets = found.setdefault(folder, {})
        for name in running_imports(path):
            module = name.removeprefix("girih.")
            while module and not is_module(module):  # a name inside a module
                module = module.rpartition(".")[0]
            if name.startswith("girih.") and module:
                targets[folder_of(module)] = str(path.relative_to(ROOT))
    return found


def is_module(dotted):
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_folders_import_what_the_table_allows():
    wrong = {
        f"{file} imports {target}"
        for folder, targets in arrows().items()
        for target, file in targets.items()
        if (
            target not in {folder, "kernels.base", *ARROWS.get(folder, "").split()}
            and not (folder + ".").startswith(target + ".")
        )  # a package names the parts it holds
        or (folder not in ARROWS and target)
    }
    assert wrong == set()


def test_the_table_has_no_circle_and_nothing_unused():
    done = set()
    for folder, allowed in ARROWS.items():  # each line may name earlier lines only
        assert set(allowed.split()) <= done, f"{folder}: {set(allowed.split()) - done} come later"
        done.add(folder)
    found = arrows()
    unused = {f: set(a.split()) - set(found.get(f, {})) for f, a in ARROWS.items()}
    assert {folder: names for folder, names in unused.items() if names} == {}


def test_no_module_imports_itself_through_others():
    graph = {}
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = {name.removeprefix("girih.") for name in running_imports(path)}
        files = {n for n in names if (ROOT / n.replace(".", "/")).with_suffix(".py").is_file()}
        graph[module] = files - {module}
    while leaves := {m for m, targets in graph.items() if not targets & set(graph)}:
        graph = {m: targets for m, targets in graph.items() if m not in leaves}
    assert graph == {}


def test_folders_say_what_they_own():
    for folder in ARROWS:
        text = (ROOT / folder.replace(".", "/") / "__init__.py").read_text()
        assert "ust not know" in text, f"{folder}/__init__.py says not what it must not know"


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
    assert {f for f in users if not f.startswith(("conf/", "serve/cli"))} == set()


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


def test_every_folder_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(("girih", *path.relative_to(ROOT).parts[:-1])) for path in SOURCES}
    assert set(settings["packages"]) == folders | {"girih"}
    assert all(
        (ROOT / name.partition(".")[2].replace(".", "/") / "__init__.py").is_file()
        for name in folders
    )
