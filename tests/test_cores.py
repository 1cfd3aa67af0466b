"""The cores of a process, how ranks share them, and what loaders make of them by default."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddlbench.cores import allowed_cores, default_workers, few_cores, fewest_cores
from tests.support.runs import RESNET

EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([("a", EIGHT)], 8),
        ([("a", EIGHT)] * 4, 2),
        ([("a", EIGHT)] * 3, 2),
        ([("a", [0, 1])] * 2, 1),
        ([("a", [0])] * 4, 1),
        ([("a", EIGHT), ("b", EIGHT)], 8),
        ([("a", EIGHT[:4]), ("a", EIGHT[4:])], 4),  # a task's own cores, as Slurm binds them
        ([("a", EIGHT[:6]), ("a", EIGHT[4:])], 3),  # two cores are shared
        ([("a", EIGHT), ("b", [3])], 1),
        ([("a", list(range(6)))] * 6, 1),  # six sixths, without rounding
    ],
)
def test_ranks_that_may_run_on_the_same_cores_share_them(ranks: list[tuple[str, list[int]]], cores: int) -> None:
    assert fewest_cores(ranks) == cores


@pytest.mark.parametrize(
    ("cores", "device", "threads", "workers"),
    [
        (1, "cpu", 1, 1),  # each of two ranks of a laptop with two cores
        (2, "cpu", 1, 1),
        (8, "cpu", 1, 7),
        (8, "cpu", 4, 4),
        (8, "cpu", 8, 1),
        (64, "cpu", 1, 8),
        (1, "cuda", 1, 1),
        (8, "cuda", 8, 6),  # only on the CPU ranks compute with threads
        (64, "cuda", 1, 16),
    ],
)
def test_workers_are_the_cores_that_a_rank_leaves_free(cores: int, device: str, threads: int, workers: int) -> None:
    assert default_workers(cores, device, threads) == workers


@pytest.mark.parametrize(("cores", "workers", "wanted"), [(1, 1, 3), (1, 0, 2), (9, 8, 10)])
def test_too_few_cores_get_advice_in_one_line(cores: int, workers: int, wanted: int) -> None:
    said = few_cores(cores, workers)
    assert said is not None
    assert f"each rank has {cores} core{'s' if cores > 1 else ''} for itself" in said
    assert f"--cpus-per-task={wanted}" in said
    assert "\n" not in said
    assert few_cores(wanted, workers) is None


@pytest.mark.parametrize("cores", [3, 10, 100])
def test_enough_cores_for_the_default_get_no_advice(cores: int) -> None:
    assert few_cores(cores, default_workers(cores, "cuda", 1)) is None


def test_the_record_has_cores_and_workers_and_the_configuration_neither(
    ddlbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines: the same run_id."""
    for cores, workers in (({0, 1}, 1), ({0, 1, 2}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        code, said = ddlbench(*RESNET, "data.val_limit=5", "mode=loader", f"results_dir=workers-{workers}")
        assert code == 0, said
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("workers-*/*/attempt-1/run.json")))
    assert [(run["loader"]["cores"], run["loader"]["workers"]) for run in (first, second)] == [(2, 1), (3, 2)]
    assert first["config"]["loader"]["workers"] is None
    assert first["run_id"] == second["run_id"]


def test_the_cores_of_a_process_are_those_of_its_affinity_or_else_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    assert allowed_cores() == [3, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_cores() == [0, 1, 2]
