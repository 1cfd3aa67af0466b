from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ddlbench.command import ended
from ddlbench.data import __main__ as data
from ddlbench.errors import Unsupported, UserError
from ddlbench.report import __main__ as report


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (lambda: 5, 5, ""),
        (lambda: None, 0, ""),
        (raising(UserError("a\nb \x1b")), 2, "it: a\\nb \\x1b\n"),
        (raising(Unsupported("no")), 3, "it: no\n"),
        (raising(OSError(errno.EIO, "x", "here")), 2, "it: here cannot be read or written (Input/output error)\n"),
        (raising(KeyboardInterrupt()), 130, "it: start again\n"),
    ],
)  # fmt: skip
def test_what_ends_a_command_is_its_exit_code_and_one_line(
    work: Callable[[], int | None], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("it", work, "start again") == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (report.main, [""]),
        (report.main, ["none", "--out", ""]),
        (report.main, ["--compare", "", "none"]),
        (data.main, ["info", ""]),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    parser: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parser(words)
    assert "the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
@pytest.mark.parametrize("words", ["ddlbench --version", "ddlbench.sweep", "ddlbench +framework=ddp"])
def test_a_stream_that_was_closed_before_the_start_is_one_that_nobody_reads(words: str, closed: str) -> None:
    command = f"exec {sys.executable} -m {words} {closed}"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == (2 if "ddp" in words else 0)
    assert "Traceback" not in process.stderr


def unread(stream: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of which nobody reads stdout or stderr."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: pipe}
        return subprocess.run([sys.executable, "-m", *words], text=True, timeout=300, check=False, **streams, **more)


@pytest.mark.parametrize(("key", "code"), [("dryrun=true", 0), ("train.epochs=none", 2)])
def test_remarks_and_errors_that_nobody_reads_change_no_exit_code(key: str, code: int) -> None:
    words, variables = ("ddlbench", "+framework=single", "+model=resnet50", key), os.environ | {"SLURM_NTASKS": "2"}
    assert unread("stderr", *words, env=variables).returncode == code


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ddlbench", "--help"], 141),
        (["ddlbench", "--version"], 141),
        (["ddlbench", "+framework=ddp", "+model=resnet50", "--cfg", "job"], 141),
        (["ddlbench.sweep"], 0),
    ],
)
def test_a_reader_that_has_enough_ends_what_only_prints_and_no_work(words: list[str], code: int) -> None:
    process = unread("stdout", *words)
    assert (process.returncode, process.stderr) == (code, "")
