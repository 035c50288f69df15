"""What the Markdown files claim of the repository: paths exist, the README stays short."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_ENDINGS = "py|cpp|h|js|html|css|yaml|yml|md|json|png"
_NAME = re.compile(rf"[\w.-]+(?:/[\w.-]+)*\.(?:{_ENDINGS})")
_FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_PLACEHOLDER = re.compile(r"NAME|VERB|PART|FAMILY|KEY|URL|O4")
# Files that users or girih write, and those of a model's directory.
_ELSEWHERE = re.compile(
    r"(generation_config|tokenizer_config|tokenizer|config|key|page|cost|trace|records|vocab"
    r"|openapi)\.(json|html)|additional_chat_templates/"
)


def markdown_files():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(ROOT / line for line in listed.stdout.split())


def named_paths(text):
    """Files and folders that a text names: quoted ones, links, and paths with a slash anywhere."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if _NAME.fullmatch(quoted) or _FOLDER.fullmatch(quoted):
            yield quoted
    yield from _LINK.findall(text)
    for word in re.findall(r"[\w./-]+", text):
        if "/" in word and _NAME.fullmatch(word):
            yield word


def missing(text, folder):
    """The named paths that exist neither below the root nor in the text's folder or its parts."""
    found = []
    for name in dict.fromkeys(named_paths(text)):
        if _PLACEHOLDER.search(name) or _ELSEWHERE.fullmatch(name):
            continue
        places = (ROOT / name, folder / name, *folder.glob(f"*/{name}"))
        if not any(place.exists() for place in places):
            found.append(name)
    return found


@pytest.mark.parametrize("path", markdown_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_markdown_exist(path):
    assert missing(path.read_text(), path.parent) == []


def test_a_path_that_is_gone_is_found():
    text = "`serve/gone.py`, [x](gone/README.md), `README.md`, run tests/nowhere.py, `gone/`"
    assert missing(text, ROOT) == ["serve/gone.py", "gone/", "gone/README.md", "tests/nowhere.py"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_contributing_and_readme_name_the_same_way_of_a_request():
    ways = [
        re.findall(r"^    (?:serve|→|runtime).*$", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("README.md", "CONTRIBUTING.md")
    ]
    assert ways[0] == ways[1] != []


def test_paths_in_the_makefile_exist():
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert named and [path for path in named if not (ROOT / path).is_file()] == []
