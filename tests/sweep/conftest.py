"""The program with a small study; commands of Slurm that only note what they are given."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ddlbench.sweep import local
from ddlbench.sweep.__main__ import main
from tests.support.processes import program
from tests.sweep.studies import SINGLE, write

RECORDER = """#!/bin/bash
printf '%s\\n' "$*" >> {log}
printf '%s\\n' "${{DDLBENCH_SITE:-}}" > {log}.site
wc -l < {log}
"""


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What sbatch is given, a line a job: job 1, job 2, ... No job is ever in the queue."""
    log = tmp_path / "submitted.txt"
    for name, script in {"sbatch": RECORDER.format(log=log), "squeue": "#!/bin/bash\n"}.items():
        program(tmp_path / name, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """For a local sweep within this process: it waits for no other one, and leaves the handler of SIGTERM as it was."""
    monkeypatch.setattr(local, "TURN", tmp_path / "turn")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the program on a study of one cell, or of `content`, with results in tmp_path/results; exit code, output and
    errors."""

    def run(*words: str, **content: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(write(tmp_path, **SINGLE | content)), f"results_dir={tmp_path}/results", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run
