"""scripts/slurm/scaling.sh without a cluster: a stub of sbatch on PATH keeps the words that it was given."""

from __future__ import annotations

import json
import os
import re
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
import json, os, sys
sys.stderr.write("".join(name for name in os.environ if name.startswith("SLURM_MEM_PER_")))
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
    done = slurm.scaling(*options("8"), "--sbatch", "--comment='two words' --qos=debug", "--", *words)
    assert done.returncode == 0, done.stderr
    (job,) = slurm.jobs
    assert {"--comment=two words", "--qos=debug"} <= {*job}
    assert job[-len(words) - 2 :][: len(words)] == [*words]
    assert rf"ddlbench.report {tmp_path}/two\ words --out {tmp_path}/two\ words/report" in done.stdout
    assert not (tmp_path / "two words").exists()


def test_the_seed_gives_a_random_order_of_all_counts_and_repeats_and_a_dry_run_submits_nothing(
    slurm: Submitted,
) -> None:
    def plan(seed: str) -> list[str]:
        done = slurm.scaling(*options("1 2 4 8"), "--repeats", "3", "--dry-run", "--seed", seed, "--", *TINY)
        return [line for line in done.stdout.splitlines() if line.startswith("sbatch ")]

    lines = plan("1")
    assert lines == plan("1")
    assert lines != plan("2")
    sizes = [re.findall(r"--nodes=(\d) --ntasks-per-node=(\d) .* train.repeat=(\d)", line)[0] for line in lines]
    wanted = [(nodes, tasks, repeat) for nodes, tasks in ("11", "12", "14", "24") for repeat in "012"]
    assert sorted(sizes) == sorted(wanted)
    assert sizes != sorted(sizes)
    assert slurm.jobs == []


def test_a_batch_need_not_divide_over_the_gpus_of_a_pipeline(slurm: Submitted) -> None:
    """Its one replica has the whole batch."""
    words = ["+framework=gpipe" if word == TINY[0] else word for word in TINY]
    done = slurm.scaling(*options("3", "strong"), "--", *words, "train.micro_batch=2")
    assert (done.returncode, done.stderr, len(slurm.jobs)) == (0, "", 1)


@pytest.mark.parametrize(("kind", "key"), [("weak", "train.batch_per_gpu"), ("strong", "train.global_batch")])
def test_the_batch_is_that_of_each_gpu_or_of_all(slurm: Submitted, kind: str, key: str) -> None:
    slurm.scaling(*options("1 2", kind), "--no-check", "--", *TINY)
    assert [job[-2:] for job in slurm.jobs] == [[f"{key}=8", "train.repeat=0"]] * 2


@pytest.mark.parametrize(
    ("words", "args", "message"),
    [
        (options("2 3", "strong", 6), ["train.micro_batch=4"], "2 GPUs would not run, .*micro_batch=4"),
        (options("1 2"), ["+framework=single"], "--gpus 2: +framework=single is one process"),
        (options("1 2"), ["train.global_batch=8"], "train.global_batch=... is what --scaling, --batch and --repeats"),
        (options("1 2 2"), [], "--gpus names 2 twice"),
        (options("6"), [], "--gpus 6 does not fill nodes of 4 GPUs"),
        (options("one"), [], "--gpus one: a whole number"),
        (options("3", "strong"), [], "3 GPUs would not run, .*train.global_batch=8 does not divide over 3 replicas"),
        (options("1", "some"), [], "--scaling some: weak or strong"),
        (["--gpus", "1"], [], "--gpus-per-node is missing"),
        (["--gpu", "1"], [], "unknown option --gpu"),
        (["--gpus"], None, "--gpus needs a value"),
    ],
)
def test_what_would_not_run_is_not_submitted(
    slurm: Submitted, words: list[str], args: list[str] | None, message: str
) -> None:
    """args: for ddlbench, beside TINY; None: nothing for ddlbench"""
    replaced = [arg.partition("=")[0] for arg in args or []]
    given = [word for word in TINY if word.partition("=")[0] not in replaced]
    refused = slurm.scaling(*words, *([] if args is None else ["--", *given, *args]))
    assert (refused.returncode, refused.stdout) == (2, "")
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
    """Also from within a job, whose memory is not that of the new job."""
    done = slurm.scaling(*options("2"), "--no-check", "--", *TINY, "train.micro_batch=5", SLURM_MEM_PER_CPU="100")
    assert (done.returncode, done.stderr, len(slurm.jobs)) == (0, "", 1)
