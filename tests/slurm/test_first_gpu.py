"""scripts/first_gpu.sh two-nodes under a real Slurm, over gloo and shrunk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_part_about_faults_is_submitted_and_passes(slurm, tmp_path: Path) -> None:
    small = {"DDLBENCH_TINY": "1", "GPUS": "1", "CPUS": "1", "HANG_S": "20"}
    output = tmp_path / "out.txt"
    done = slurm.run(
        "scripts/first_gpu.sh", "two-nodes", "faults", tmp_path / "results", cwd=ROOT, PYTHON=sys.executable,
        WHEELS="nowhere", SBATCH_OPTIONS=f"--output={output}", **small,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (state,) = slurm.wait(done.stdout.split()[-1])
    said = output.read_text()
    assert state == "COMPLETED", said
    assert "| faults/rank-dies | passed: " in said
    assert "| faults/rank-hangs | passed: timeout |" in said
