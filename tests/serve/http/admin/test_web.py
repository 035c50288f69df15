"""The page's files and the status behind it, over HTTP."""

import re
import threading
from pathlib import Path

import pytest

from girih.serve.web import PAGES, read_file, read_page

TEXTS = {name: read_page(path)[0].decode() for path, (name, _) in PAGES.items()}
HTML = TEXTS["index.html"]


def test_every_file_is_served_with_its_type(shared_server):
    for path, (_, kind) in PAGES.items():
        response = shared_server.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == kind
        assert response.content == read_page(path)[0]


def test_the_policy_lets_nothing_foreign_in(shared_server):
    for path in PAGES:
        headers = shared_server.get(path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["frame-ancestors"] == "'none'"
        assert set(rules.values()) == {"'none'", "'self'"}
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_every_file_of_the_folder_is_known_and_none_is_missing():
    import girih.serve.web

    folder = Path(girih.serve.web.__file__).parent
    files = {path.name for path in folder.iterdir() if path.suffix not in (".py", ".md", "")}
    assert files == {*TEXTS, "docs.html"}  # which `test_api_document` looks at
    named = set()
    for text in (*TEXTS.values(), read_file("docs.html").decode()):
        named |= set(re.findall(r"""["'](/web/[^"']+)["']""", text))
    assert named == set(PAGES) - {"/"}


def test_no_file_names_another_host():
    for name, text in TEXTS.items():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text))
        assert hosts <= {"www.w3.org"}, name


def test_the_page_needs_no_inline_code_and_writes_no_html():
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", HTML)
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|Function\(", text)


def test_every_control_has_a_name():
    for control in re.findall(r"<button[^>]*>.*?</button>", HTML, re.DOTALL):
        text = re.sub(r"<svg.*?</svg>|<[^>]+>", "", control, flags=re.DOTALL).strip()
        assert text, control
    for field in re.findall(r"<(?:input|select|textarea)[^>]*>", HTML):
        name = re.search(r'id="([\w-]+)"', field)
        labelled = name is not None and f'for="{name.group(1)}"' in HTML
        before = HTML[: HTML.index(field)]
        assert labelled or before.rindex("<label") > before.rfind("</label>"), field


def test_ids_that_the_code_asks_for_exist():
    known = set(re.findall(r'\bid="([\w-]+)"', HTML))
    for name, text in TEXTS.items():
        asked = set(re.findall(r"""(?:getElementById|byId)\("([\w-]+)"\)""", text))
        assert asked <= known, name


def test_status_of_a_ready_server(new_server):
    server = new_server()
    before = server.get("/status").json()
    assert before["status"] == "ready"
    assert before["model"] == "fake"
    assert before["engine"]["num_generated_tokens"] == 0
    server.post("/v1/completions", prompt="Hello", max_tokens=5, ignore_eos=True)
    server.wait_idle()
    status = server.get("/status").json()
    after = status["engine"]
    assert status["step_seconds"]["run"] > 0
    assert after["num_generated_tokens"] == 5
    assert after["num_running"] == 0
    assert after["finished"] == {"length": 1}
    assert after["kv_cache"]["usage"] == 0.0


def test_status_while_loading_tells_the_stage(new_server):
    hold = threading.Event()
    server = new_server(hold=hold)
    server.wait_for(lambda: "stage" in server.get("/status").json())
    status = server.get("/status").json()
    assert (status["status"], status["stage"]) == ("loading", "compile")
    assert (status["done"], status["total"]) == (1, 3)
    assert "engine" not in status
    hold.set()
    server.wait_for(lambda: server.get("/status").json()["status"] == "ready")


def test_a_guarded_server_shows_the_page_but_no_status(new_server):
    server = new_server(serve={"api_keys": ("k",)})
    assert all(server.get(path).status_code == 200 for path in PAGES)
    assert server.get("/status").status_code == 401
    headers = {"authorization": "Bearer k"}
    assert server.get("/status", headers=headers).json()["status"] == "ready"


@pytest.mark.parametrize("path", ["/web/", "/web/nothing.js", "/web/__init__.py", "/web/../cli.py"])
def test_nothing_else_is_read(shared_server, path):
    assert shared_server.get(path).status_code == 404
