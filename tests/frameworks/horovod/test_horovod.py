"""Horovod's own knobs and refusals; that it trains what one process trains is tests/equality/test_equal_training.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ddlbench.errors import Unavailable
from ddlbench.frameworks.horovod.adapter import Horovod, horovod_torch, stall_seconds
from tests.support.equal import make_job, ready, train_case
from tests.support.faults import end, start
from tests.support.jobs import CASE, refused, two_ranks, wrong_knob
from tests.support.libraries import needs_horovod, why_no_horovod
from tests.support.processes import PYTHON, run
from tests.support.ranks import results, run_ranks
from tests.support.reference import Outcome
from tests.support.runs import record

CASES = {"whole": CASE, "accumulated": replace(CASE, micro_batch=3)}


def both_loops() -> dict[str, tuple[Outcome, dict[str, torch.Tensor]]]:
    """What the adapter trains, and the weights of the documentation's loop."""
    from tests.frameworks.horovod import horovod_loop  # imports Horovod

    return {name: (train_case(case, Horovod()), horovod_loop.train(case)) for name, case in CASES.items()}


def first_operations() -> list[tuple[torch.device, str]]:
    """Device and phase of each all-reduce that is asked for by name. NCCL makes Horovod's communicator at its first
    operation on a device: which is in the set-up."""
    result, phase, hvd = list[tuple[torch.device, str]](), "set-up", horovod_torch()
    real = hvd.allreduce

    def recorded(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        result.append((tensor.device, phase))
        return real(tensor, **options)

    with patch.object(hvd, "allreduce", recorded), ready(Horovod(), make_job(CASE)) as (trainer, _):
        phase = "after"
        trainer.state()
    return result


def facts() -> dict[str, Any]:
    job = replace(make_job(CASE), micro_batch=3, reduce_dtype="fp16")
    with ready(Horovod(fusion_threshold_mb=64), job) as (trainer, _):
        return trainer.facts()


def other_weights() -> str:
    """How the set-up ends if ranks start from different weights."""
    job = make_job(CASE)
    try:
        Horovod().setup(replace(job, seed=job.seed + job.rank)).close()
    except AssertionError as error:
        return str(error)
    return "no error"


WORK: dict[str, Callable[[], Any]] = {
    "loops": both_loops, "facts": facts, "first": first_operations, "other_weights": other_weights,
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What rank 0 found, all in one set of processes: Horovod is started and shut down anew for each."""
    if reason := why_no_horovod():
        pytest.skip(reason)
    return run_ranks(2, results, WORK)[0]


def test_its_communicator_is_made_in_the_set_up(found: dict[str, Any]) -> None:
    assert found["first"] == [(torch.device("cpu"), "set-up")]


def test_ranks_that_start_from_different_weights_are_refused(found: dict[str, Any]) -> None:
    assert found["other_weights"] == "the ranks start from different weights"


def test_facts(found: dict[str, Any]) -> None:
    assert found["facts"] == {
        "staleness": 0, "compression": "fp16", "fusion_threshold_mb": 64, "cycle_time_ms": 1.0, "adasum": False,
        "backward_passes_per_step": 2, "controller": "gloo", "reduce_dtype": "fp16",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_horovods_documented_loop(found: dict[str, Any], case: str) -> None:
    ours, theirs = found["loops"][case]
    assert theirs.keys() == ours.weights.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=1e-7, msg=name)


@pytest.mark.slow
@needs_horovod
def test_horovodrun(tmp_path: Path) -> None:
    done = run(
        Path(PYTHON).with_name("horovodrun"), "-np", 2, PYTHON, "-m", "ddlbench", "+framework=horovod",
        "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32",
        "loader=synthetic", "train.global_batch=4", "train.steps=3", "train.epochs=1", "train.validate=false",
        f"results_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = record(tmp_path)
    launch = content["launch"]
    assert (content["status"], launch["launcher"], launch["world_size"]) == ("ok", "horovodrun", 2)
    assert content["framework"]["controller"] == "gloo"


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    wrong_knob(Horovod, r"framework\.compression=bf16 must be one of none, fp16", compression="bf16")
    wrong_knob(Horovod, r"fusion_threshold_mb=-1 must be 0 or more", fusion_threshold_mb=-1)
    wrong_knob(Horovod, r"cycle_time_ms=0 must be greater than 0", cycle_time_ms=0)
    adasum, three = Horovod(adasum=True), replace(two_ranks(global_batch=6), world_size=3)
    refused(adasum, three, r"adasum works on 2, 4, 8, .* this launch has 3")
    for changes in ({"precision": "fp16"}, {"clip_norm": 1.0}):
        refused(adasum, two_ranks(**changes), r"adasum updates weights before .*neither fp16 nor clipping .*=false")


def test_a_missing_library_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", None)
    refused(Horovod(), two_ranks(), r"scripts/install_horovod\.sh gloo", Unavailable)


@needs_horovod
def test_a_gpu_or_adasum_needs_another_flavour() -> None:
    from horovod.torch import mpi_built, nccl_built  # pyright: ignore[reportMissingImports]

    if not nccl_built():
        refused(Horovod(), two_ranks(device=torch.device("cuda", 0)), r"install_horovod\.sh nccl", Unavailable)
    if not mpi_built():
        refused(Horovod(adasum=True), two_ranks(), r"install_horovod\.sh mpi", Unavailable)


@needs_horovod
@pytest.mark.parametrize(("nccl", "mpi"), [(True, False), (False, True), (False, False)])
def test_adasum_on_gpus_needs_nccl_and_mpi(monkeypatch: pytest.MonkeyPatch, nccl: bool, mpi: bool) -> None:
    hvd = horovod_torch()
    monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
    monkeypatch.setattr(hvd, "mpi_built", lambda: mpi)
    on_gpus = two_ranks(device=torch.device("cuda", 0))
    refused(Horovod(adasum=True), on_gpus, r"both NCCL and MPI: build it with scripts/install_horovod.sh nccl-mpi")


@needs_horovod
@pytest.mark.slow  # that a rank which raises ends the others is one of tests/run/test_supervisor.py
@pytest.mark.parametrize(
    ("how", "more", "status", "reason", "codes"),
    [
        ("exit", (), "error", r"rank 1 .* ended without a message, .*; rank 0: HorovodInternalError", {(1, 9)}),
        # Horovod 0.28.1 does not always report the stall: its check of the gradients in its cache can hang itself.
        # Then the watch of either rank ends both.
        (
            "hang",
            ("train.timeout_s=6",),
            "timeout",
            r"rank 0: TimeoutError: horovod timed out|rank \d: no step ended within 6 s",
            {(8, 6), (8, 8), (6, 8)},
        ),
    ],
)
def test_a_rank_that_vanishes_leaves_nobody_waiting(
    tmp_path: Path, how: str, more: tuple[str, ...], status: str, reason: str, codes: set[tuple[int, int]]
) -> None:
    exits, said = end(start(tmp_path, how, *more, framework="horovod"))
    content = record(tmp_path)
    assert (content["status"], tuple(exits)) in {(status, pair) for pair in codes}, said
    assert re.match(reason, content["reason"])


def test_a_stall_is_noticed_within_the_timeout() -> None:
    # Two looks to notice, the stall itself, one look to see that it is over.
    for timeout_s in (5.0, 60.0, 600.0):
        stall = stall_seconds(two_ranks(timeout_s=timeout_s))
        look = int(Horovod()._variables(two_ranks(timeout_s=timeout_s))["HOROVOD_STALL_CHECK_TIME_SECONDS"])
        assert 3 * look + stall <= timeout_s
        assert look <= stall  # else Horovod would not shut down at all
