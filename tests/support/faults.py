"""Ranks with a planted fault, started one by one: nothing ends one because another failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import ddlbench.__main__ as program
from ddlbench.ranks.launchers import free_port, rank_variables
from tests.support import planted
from tests.support.ranks import Forked
from tests.support.runs import OF_IMAGES, record
from tests.support.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]


@cache
def patience_s() -> float:
    """A timeout that a healthy run does not reach on this machine now: it follows the measured length of a start."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
    return max(15.0, 4 * (time.monotonic() - began))


def command(folder: Path, how: str, *more: str, framework: str = "ddp") -> list[str]:
    """The words after python. Those of `more` with a + are for planted.py: +framework.on=0, +data=Stopping."""
    planted = [f"framework.how={how}", *(word[1:] for word in more if word.startswith("+"))]
    words = [
        f"+framework={framework}", *OF_IMAGES, "loader=synthetic", "train.global_batch=4", "train.steps=20",
        "train.epochs=1", "train.validate=false", f"results_dir={folder}",
        *(word for word in more if not word.startswith("+")),
    ]  # fmt: skip
    return ["-m", "tests.support.planted", *planted, "--", *{word.partition("=")[0]: word for word in words}.values()]


def variables(ranks: int) -> list[dict[str, str]]:
    """The environment variables of the ranks of one run, by rank."""
    port = free_port()
    return [{**rank_variables(rank, ranks, port), "PYTHONPATH": f"{ROOT}/src:{ROOT}"} for rank in range(ranks)]


def start(folder: Path, how: str, *more: str, ranks: int = 2, framework: str = "ddp") -> list[Forked]:
    """One process for each rank, which need not import the libraries."""
    words = command(folder, how, *more, framework=framework)
    return [Forked(run_planted, words[1:], **own) for own in variables(ranks)]


def run_planted(words: list[str]) -> int:
    sys.argv = words
    program.STARTED = time.perf_counter()
    return planted.main()


def start_programs(folder: Path, how: str, *more: str, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """One program for each rank, as a user starts it. Its loader workers are its children and write where it does."""
    words = [sys.executable, *command(folder, how, *more)]
    return [
        subprocess.Popen(words, env={**os.environ, **own}, text=True, stderr=subprocess.PIPE)
        for own in variables(ranks)
    ]


def end(processes: Sequence[Forked | subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes and what each said; a process that does not end in time is a failure."""
    deadline = time.monotonic() + WITHIN_S
    try:
        said = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in processes], said


def begun(folder: Path, epochs: int = 0) -> bool:
    """Whether there is a record of so many epochs."""
    if not list(folder.glob("*/attempt-1/run.json")):
        return False
    return record(folder).get("summary", {}).get("epochs_done", -1) >= epochs
