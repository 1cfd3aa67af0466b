"""The program as users start it: every family of frameworks under torchrun, and mpirun with the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import AS_ROOT, MPI, PYTHON, need, run
from tests.support.runs import OF_IMAGES, record

TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
IMAGES = (
    "ddlbench", *OF_IMAGES, "loader=synthetic", "progress=false", "train.global_batch=16", "train.micro_batch=2",
    "train.steps=2", "train.epochs=1", "data.val_limit=10",
)  # fmt: skip
TEXT = (
    "ddlbench", "+model=gpt2_small", "model.n_layer=2", "model.n_embd=64", "model.n_head=4", "model.vocab_size=2048",
    "model.seq_len=32", "progress=false", "train.global_batch=8", "train.micro_batch=2", "train.steps=2",
    "train.epochs=1", "data.val_limit=5",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    [
        ("fsdp",),
        ("tensor", "framework.sequence_parallel=true"),
        ("gpipe",),
        ("zbv",),
        ("hybrid", "framework.tp=2"),
        ("hybrid", "framework.dp=2", "framework.sharded=true"),
    ],
    ids=" ".join,
)
def test_text_on_real_files_runs_under_torchrun(tmp_path: Path, framework: tuple[str, ...]) -> None:
    name, *knobs = framework
    done = run(*TORCHRUN, *TEXT, f"+framework={name}", *knobs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = record(tmp_path)
    assert (content["status"], content["ledger"]["updates"]) == ("ok", 2)
    assert content["summary"]["val_perplexity_token"] > 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("mpirun", MPI)
def test_images_run_under_mpirun(tmp_path: Path, mpirun: str) -> None:
    need({mpirun: MPI[mpirun]})
    command = (mpirun, "-n", 2, PYTHON, "-m", *IMAGES, "+framework=ddp")
    done = run(*command, cwd=tmp_path, **AS_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    content = record(tmp_path)
    assert (content["status"], content["launch"]["launcher"], content["ledger"]["updates"]) == ("ok", "mpirun", 2)
