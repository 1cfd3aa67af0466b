"""scripts/jube: JUBE itself reads the file, submits each cell and makes the table; skipped where it is not installed.
sbatch is a stand-in that leaves a record and notes its words."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.processes import need, program, run
from tests.support.records import write_run

ROOT = Path(__file__).parents[2]
SBATCH = """#!/bin/sh
echo "$*" >>{log}
mkdir -p results
cp -r {record}/. results
"""


def test_jube_submits_each_cell_and_reads_its_record(tmp_path: Path) -> None:
    need({"jube": "jube"})
    for name in ("jube", "slurm"):
        shutil.copytree(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (script,) = (tmp_path / "scripts" / "jube").glob("*.yaml")
    write_run(tmp_path / "record", rate=125.5, epochs=2)
    log = tmp_path / "log.txt"
    sbatch = program(tmp_path / "bin/sbatch", SBATCH.format(log=log, record=tmp_path / "record"))
    variables = {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = run("jube", "run", script, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    submitted = log.read_text().splitlines()
    assert len(submitted) == 4 * 6
    (largest,) = [line for line in submitted if " --nodes=2 " in line and "train.repeat=5" in line]
    assert "--wait --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 " in largest
    (named,) = [Path(word) for word in largest.split() if word.endswith("run.sbatch")]
    assert named.samefile(tmp_path / "scripts" / "slurm" / "run.sbatch")
    table = run("jube", "result", "-a", tmp_path / "build" / "jube", cwd=tmp_path, **variables)
    assert table.returncode == 0, table.stdout + table.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in table.stdout.splitlines() if "125.5" in line]
    assert len(rows) == 24
    assert all("ok" in row and str(2 * 2**30) in row for row in rows)
