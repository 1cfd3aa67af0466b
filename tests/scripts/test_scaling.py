"""scripts/slurm/scaling.sh without a cluster: a stub of sbatch on PATH keeps the words that it was given."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import PYTHON, program, run
from tests.support.runs import SMALL

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "scaling.sh"
TINY = ("+framework=ddp", *SMALL[1:6])
BF16 = "framework.comm_hook=bf16"
STUB = f"""#!{PYTHON}
import json, sys
with open(sys.argv[0] + ".jobs", "a") as jobs:
    jobs.write(json.dumps(sys.argv[1:]) + "\\n")
print(7)
"""


class Submitted:
    def __init__(self, folder: Path) -> None:
        self.stub = program(folder / "bin/sbatch", STUB)

    def scaling(self, *words: str, python: str = PYTHON, **env: Any) -> subprocess.CompletedProcess[str]:
        path = f"{self.stub.parent}:{os.environ['PATH']}"
        return run(SCRIPT, *words, PATH=path, DDLBENCH_PYTHON=python, **env)

    @property
    def jobs(self) -> list[list[str]]:
        kept = self.stub.with_name("sbatch.jobs")
        return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> Submitted:
    return Submitted(tmp_path)


def options(gpus: str, kind: str = "weak", batch: int = 8) -> list[str]:
    return ["--gpus", gpus, "--gpus-per-node", "4", "--scaling", kind, "--batch", str(batch)]


def test_a_path_with_spaces_stays_one_word(slurm: Submitted, tmp_path: Path) -> None:
    """bf16 on the wire needs NCCL: the plan is for the GPUs of the nodes, whatever this machine has."""
    words = (*TINY, BF16, f"results_dir={tmp_path}/two words")
    done = slurm.scaling(*options("8"), "--", *words)
    assert done.returncode == 0, done.stderr
    (job,) = slurm.jobs
    assert job[-len(words) - 2 :][: len(words)] == [*words]
    assert rf"ddlbench.report {tmp_path}/two\ words --out {tmp_path}/two\ words/report" in done.stdout
    assert not (tmp_path / "two words").exists()


@pytest.mark.parametrize(
    ("words", "args", "message"),
    [
        (options("2 3", "strong", 6), ("train.micro_batch=4",), "2 GPUs would not run, .*micro_batch=4"),
        (options("1"), ("framework.bucket_cap_mb=0",), "1 GPUs would not run, .* framework.bucket_cap_mb=0.0 must be"),
        (options("1 2"), ("+framework=single",), "--gpus 2: +framework=single is one process"),
        (options("1 2 2"), (), "--gpus names 2 twice"),
    ],
)
def test_what_would_not_run_is_not_submitted(
    slurm: Submitted, words: list[str], args: tuple[str, ...], message: str
) -> None:
    given = [word for word in TINY if not any(arg.startswith(f"{word.partition('=')[0]}=") for arg in args)]
    refused = slurm.scaling(*words, "--", *given, *args)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert all(part in line for part in message.split(".*")), line
    assert slurm.jobs == []


def test_the_plan_of_jobs_without_gpus_refuses_what_needs_them(slurm: Submitted) -> None:
    refused = slurm.scaling(*options("2"), "--sbatch", "--gpus-per-node=0", "--", *TINY, BF16)
    assert refused.returncode == 2
    assert "bf16" in refused.stderr
    assert slurm.jobs == []


def test_a_machine_that_cannot_check_submits_and_says_so(slurm: Submitted) -> None:
    done = slurm.scaling(*options("2"), "--", *TINY, python="/nowhere/python")
    assert done.returncode == 0
    assert "2 GPUs could not be checked on this machine: " in done.stderr
    assert len(slurm.jobs) == 1


def test_no_check_submits(slurm: Submitted) -> None:
    done = slurm.scaling(*options("2"), "--no-check", "--", *TINY, "framework.bucket_cap_mb=0")
    assert (done.returncode, done.stderr, len(slurm.jobs)) == (0, "", 1)
