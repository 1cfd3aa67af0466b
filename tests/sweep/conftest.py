"""Commands of Slurm that only note what they are given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log
