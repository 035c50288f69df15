"""`girih passes`: on a tiny model, through the command line."""

import pytest
from support_models import tiny_model

from girih.passes.options import PASS_NAMES
from girih.serve.cli import main as cli


@pytest.fixture
def girih(capsys):
    def run(*words):
        code = cli.main(["passes", *words, "-q"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model():
    return f"model={tiny_model('llama')}"


def rows(table):
    """Name and number of rewrites of each line of a pass table."""
    return {line.split()[0]: int(line.split()[1]) for line in table.splitlines()[1:]}


def test_list_shows_levels_and_switches(girih):
    code, out, _ = girih("list", "opt=O2", "opt.passes.pack_linears=false")
    lines = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert code == 0
    assert tuple(lines) == PASS_NAMES
    assert lines["canonicalize"][2] == "O0"
    assert "on" in lines["merge_sibling_linears"]
    assert "off" in lines["pack_linears"]


def test_a_dump_can_be_run_again_and_compared(girih, model, tmp_path):
    code, first, _ = girih("run", model, f"opt.dump={tmp_path}", "opt.verify=true")
    assert code == 0
    assert first.count("verified") == len(PASS_NAMES)
    graph = f"graph={tmp_path / '001_canonicalize.json'}"
    code, again, _ = girih("run", graph, "opt.passes.canonicalize=false", "text=true")
    assert code == 0
    table = again[again.index("pass  ") :]
    assert rows(table) == {**rows(first), "canonicalize": 0}
    assert "girih.packed_linear" in again
    sides = (
        f"before={tmp_path / '000_traced.json'}",
        f"after={tmp_path / '001_canonicalize.json'}",
    )
    code, difference, _ = girih("diff", *sides)
    assert code == 1
    assert "_assert_tensor_metadata" in difference
    assert girih("diff", sides[0], sides[0].replace("before", "after"))[:2] == (0, "")


def test_levels_are_compared(girih, model):
    code, difference, _ = girih("diff", model, "before=O0", "after=O2")
    assert code == 1
    assert "+%" in difference
    assert "girih.packed_linear" in difference


def test_a_check_is_bisected(girih, model):
    check = "check=echo '{opt}' | grep -q merge_sibling_linears=false"
    code, out, err = girih("bisect", model, check)
    assert (code, out) == (0, "merge_sibling_linears\n")
    assert "good: 0 passes" in err


def test_verify_is_the_check_when_none_is_named(girih, model):
    code, out, _ = girih("bisect", model)
    assert code == 0
    assert "every pass is verified" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "opt.passes.pack_linear=true"), "did you mean 'opt.passes.pack_linears'"),
        (
            ("run", "opt.stop_after=merge"),
            "opt.stop_after is 'merge'; it must be one of canonicalize",
        ),
        (("run", "graph=nothing.json"), "there is no such file"),
        (("run", f"graph={__file__}"), "is not a dumped graph"),
        (("diff", "before=O1"), "name both sides"),
        (("bisect", "check=true"), "put {opt} in it"),
    ],
)
def test_mistakes_are_explained(girih, words, told):
    code, _, err = girih(*words)
    assert code in (1, 2)
    assert told in err
