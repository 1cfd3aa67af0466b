"""`make papers` without its programs: what an interruption ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import program, run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("code", "ended", "sweeps"), [(130, 130, 1), (1, 0, 5)])
def test_ctrl_c_of_a_sweep_ends_all_and_failed_cells_do_not(tmp_path: Path, code: int, ended: int, sweeps: int) -> None:
    """The sweep itself ends with 130: the shell sees no process that a signal has ended."""
    script = program(tmp_path / "scripts/papers.sh", (ROOT / "scripts/papers.sh").read_text())
    (tmp_path / "results").mkdir()
    text = f"echo $2 >> called\nmkdir -p results/papers results/$3\n[ $2 != ddlbench.sweep ] || exit {code}\n"
    program(tmp_path / ".venv/bin/python", f"#!/bin/bash\n{text}")
    assert run(script).returncode == ended
    assert (tmp_path / "called").read_text().split().count("ddlbench.sweep") == sweeps
