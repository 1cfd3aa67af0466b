from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

import pytest

from ddlbench.progress import Progress, tell


def test_a_text_of_a_library_is_one_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    tell("error: rank 1: no file \x1b[2J\nin /tmp")
    assert capsys.readouterr().err == "ddlbench: error: rank 1: no file \\x1b[2J\\nin /tmp\n"


def test_without_a_reader_a_line_is_lost_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        tell("the record is in results")
        Progress(True).say("epoch 0")
        monkeypatch.undo()
        with suppress(OSError):
            stream.close()


def test_plain_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(True, every_s=0.0)
    assert list(progress.steps(iter("abc"), 3, "epoch 0")) == ["a", "b", "c"]
    progress.say("done")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch 0: 1/3", "epoch 0: 2/3", "epoch 0: 3/3", "done"]
    assert lines[0].endswith(" steps/s")


def test_few_lines_of_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(Progress(True, every_s=3600.0).steps(range(1000), 1000, "epoch 0"))) == 1000
    assert capsys.readouterr().err == ""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(False, every_s=0.0)
    assert list(progress.steps(range(3), 3, "epoch 0")) == [0, 1, 2]
    progress.say("done")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(Progress(True).steps(range(3), 3, "epoch 7", "images")) == [0, 1, 2]
    assert "epoch 7" in terminal.getvalue()
    assert "image/s" in terminal.getvalue()
