import io

import pytest
from rich.console import Console

from girih.kernels.base.progress import ProgressEvent
from girih.serve.progress import ProgressDisplay

EVENTS = [
    ProgressEvent("trace", 0, None, "layers"),
    ProgressEvent("compile", 1, 3, "tile [1] of 3"),
    ProgressEvent("compile", 2, 3, "tile [2] of 3"),
]


def test_one_line_per_stage_when_stderr_is_no_terminal(capsys):
    with ProgressDisplay() as display:
        for event in EVENTS:
            display(event)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "trace: layers"
    assert lines[1].startswith("trace: done in")
    assert lines[2] == "compile: tile [1] of 3"
    assert len(lines) == 4


def test_quiet_draws_nothing(capsys):
    with ProgressDisplay(quiet=True) as display:
        for event in EVENTS:
            display(event)
    assert capsys.readouterr() == ("", "")


def test_bars_on_a_terminal_are_removed_at_the_end(monkeypatch):
    screen = io.StringIO()
    display = ProgressDisplay()
    display._console = Console(file=screen, force_terminal=True, width=120)
    display._live = True
    with display:
        for event in EVENTS:
            display(event)
        display._bar.refresh()
        finished = {task.description: task.finished for task in display._bar.tasks}
    assert finished == {"trace": True, "compile": False}  # "trace" said no end of its own
    text = screen.getvalue()
    assert "tile [2] of 3" in text
    assert "2/3" in text
    assert display._bar is None


def test_a_stage_that_failed_is_not_said_to_be_done(capsys):
    with pytest.raises(ValueError, match="no"), ProgressDisplay() as display:
        display(EVENTS[0])
        raise ValueError("no")
    assert capsys.readouterr().err == "trace: layers\n"


@pytest.mark.parametrize("quiet", [True, False])
def test_closing_twice_is_harmless(quiet):
    display = ProgressDisplay(quiet)
    display.close()
    display.close()
