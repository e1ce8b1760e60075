"""Progress on stderr: plain lines now and then, or a bar on a terminal."""

import io
import sys

from pop_export import progress as module
from pop_export.progress import progress


def test_without_a_terminal_a_quick_stage_prints_nothing(capsys):
    with progress("calibrating", 2) as advance:
        advance(1)
        advance(1)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_without_a_terminal_a_line_with_the_time_left_comes_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with progress("calibrating", 8) as advance:
        for _ in range(4):
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 2 of 8, about 60 s left",
        "calibrating: 4 of 8, about 40 s left",
    ]


def test_a_terminal_gets_a_bar_on_stderr(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("calibrating", 2) as advance:
        advance(2)
    assert "calibrating" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert capsys.readouterr().out == ""
