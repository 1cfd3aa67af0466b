"""scripts/reframe: ReFrame itself runs a cell on this machine; skipped where it is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run

CHECK = Path(__file__).parents[2] / "scripts" / "reframe" / "ddlbench_cell.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("reframe"), reason="needs ReFrame: pip install reframe-hpc, on PATH"),
]


def reframe(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    files = (f"--prefix={folder}", f"--report-file={folder}/report.json")
    return run("reframe", "-c", CHECK, "-r", "-S", f"python={sys.executable}", *files, *options, cwd=folder)


def test_reframe_runs_a_cell_and_reads_its_throughput(tmp_path: Path) -> None:
    done = reframe(tmp_path, "--keep-stage-files")
    assert done.returncode == 0, done.stdout
    (path,) = tmp_path.glob("stage/**/attempt-1/run.json")
    report = (tmp_path / "report.json").read_text()
    summary = json.loads(path.read_text())["summary"]
    assert f"{summary['throughput_samples_per_s']}" in report


def test_a_run_without_a_good_record_fails_the_check(tmp_path: Path) -> None:
    words = "words=+framework=single +model=resnet50 train.epochs=0"
    done = reframe(tmp_path, "-S", words)
    assert done.returncode == 1
    assert "no record" in done.stdout
