"""`make papers` without its programs: what an interruption ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("code", "ended", "sweeps"), [(130, 130, 1), (1, 0, 5)])
def test_ctrl_c_of_a_sweep_ends_all_and_failed_cells_do_not(tmp_path: Path, code: int, ended: int, sweeps: int) -> None:
    """The sweep itself ends with 130: the shell sees no process that a signal has ended."""
    script, python = tmp_path / "scripts" / "papers.sh", tmp_path / ".venv" / "bin" / "python"
    for path in (script, python, tmp_path / "results" / "papers"):
        path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "scripts" / "papers.sh", script)
    python.write_text(
        f"#!/bin/bash\necho $2 >> called\nmkdir -p results/papers results/$3\n[ $2 != ddlbench.sweep ] || exit {code}\n"
    )
    python.chmod(0o755)
    assert run(script).returncode == ended
    assert (tmp_path / "called").read_text().split().count("ddlbench.sweep") == sweeps
