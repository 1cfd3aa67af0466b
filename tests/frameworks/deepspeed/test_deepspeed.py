"""ZeRO's own knobs and refusals; that it trains what one process trains is tests/equality/test_equal_training.py."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.errors import Unavailable, Unsupported, UserError
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed, device_index
from ddlbench.frameworks.deepspeed.knobs import import_deepspeed
from ddlbench.frameworks.shared.environment import environment
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.cases import MODELS
from tests.equality.distances import TOLERANCES, distance, norm
from tests.frameworks.deepspeed.zero import (
    CASTS,
    KNOBS,
    MODEL,
    ROUNDS,
    SIXTEEN,
    STAGES,
    THREES,
    Found,
    everything_else,
    on_one_visible_gpu,
    quick,
)
from tests.support.jobs import job, refused, two_ranks
from tests.support.processes import PYTHON, run
from tests.support.ranks import run_ranks
from tests.support.reference import reference
from tests.support.runs import record

TOLERANCE = TOLERANCES["gpt2", "fp32"].weights


@pytest.fixture(scope="module")
def quickly() -> Found:
    return run_ranks(2, quick)[0]


@pytest.fixture(scope="module")
def one_gpu() -> list[dict[str, Any]]:
    return run_ranks(1, on_one_visible_gpu)[0]


@pytest.fixture(scope="module")
def results() -> Found:
    """What two ranks found, all in one pair of processes; rank 0's, and that rank 1 has no state."""
    first, second = run_ranks(2, everything_else)
    assert not any(len(weights) for weights in second["adamw"])
    return first


def test_a_version_with_known_wrong_results_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_deepspeed(torch.device("cpu")), "__version__", "0.19.7")
    with pytest.raises(Unavailable, match=r"deepspeed 0.19.7 is older than 0.19.8: pip install"):
        import_deepspeed(torch.device("cpu"))


@pytest.mark.slow
def test_knobs_train_the_same(results: Found) -> None:
    expected = reference(THREES, 2)
    off = {name: distance(outcome.weights, expected) for name, outcome in zip(KNOBS, results["knobs"], strict=True)}
    assert max(off.values()) <= TOLERANCE, off


def test_the_central_test_notices_a_planted_fault(quickly: Found) -> None:
    expected = reference(THREES, 2)
    off = [distance(outcome.weights, expected) for outcome in quickly["faults"]]
    assert min(off) > 100 * TOLERANCE, off


@pytest.mark.slow
def test_adamw_with_two_groups_and_a_schedule_is_ddps(results: Found) -> None:
    expected, *zero = results["adamw"]
    off = [norm([weights - expected]) / norm([expected]) for weights in zero]
    assert max(off[:4]) <= 1e-5, off
    assert max(off[4:]) <= 1e-2, off  # gradients travelled in fp16
    assert min(off[4:]) > max(off[:4]), off


def test_equals_deepspeeds_own_documented_loop(quickly: Found) -> None:
    for stage, (ours, theirs) in zip(STAGES, quickly["loops"], strict=True):
        assert torch.equal(ours, theirs), (stage, norm([ours - theirs]))


def test_the_gradients_norm_is_computed_for_clipping_only(quickly: Found) -> None:
    assert quickly["norms"] == [(0, False)] * 4
    assert quickly["norms when clipping"] == [(1, True)] * 4


def test_gradients_travel_during_the_backward_pass_on_gpus() -> None:
    gpu = torch.device("cuda", 0)
    by_stage = {
        device: [DeepSpeed(zero_stage=stage).overlaps(two_ranks(device=device)) for stage in STAGES]
        for device in (gpu, torch.device("cpu"))
    }
    assert list(by_stage.values()) == [[False, True, True, True], [False, False, False, True]]
    assert not DeepSpeed(zero_stage=3, overlap_comm=False).overlaps(two_ranks(device=gpu))
    assert DeepSpeed(zero_stage=1, overlap_comm=True).overlaps(two_ranks())


def test_the_facts_name_where_the_library_needs_the_norm() -> None:
    import_deepspeed(torch.device("cpu"))
    for framework, asked, needed in (
        (DeepSpeed(zero_stage=2), two_ranks(), False),
        (DeepSpeed(zero_stage=2, offload_optimizer=True), two_ranks(), True),
        (DeepSpeed(zero_stage=1, mixed_precision="weights"), two_ranks(precision="bf16"), True),
        (DeepSpeed(zero_stage=2, mixed_precision="weights"), two_ranks(precision="bf16"), False),
    ):
        assert framework.needs_norm(asked) == needed
        assert ("compute_grad_norm" in framework.config(asked)["zero_optimization"]) != needed


def test_the_only_visible_gpu_is_device_0_whatever_the_local_rank(one_gpu: list[dict[str, Any]]) -> None:
    """srun --gpus-per-task=1: local rank 1 sees one GPU. Afterwards LOCAL_RANK says the launcher's number again."""
    for stage, result in zip(STAGES, one_gpu, strict=True):
        assert set(result["asked"]) == {0}, (stage, result["asked"])
        assert result["after"] == "1"


def test_it_reduces_in_torchs_group_of_all_ranks(one_gpu: list[dict[str, Any]]) -> None:
    """It has the timeout of the job, and another one would be one more communicator."""
    assert {result["of all ranks"] for result in one_gpu} == {True}


def test_open_mpis_local_rank_equals_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asserts that both variables are equal."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    with device_index(torch.device("cuda", 0), local_rank=3):
        assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("0", "0")
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "3"


def test_a_set_up_that_fails_leaves_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = import_deepspeed(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    zero = environment({"LOCAL_RANK": "0"})
    monkeypatch.setattr("ddlbench.frameworks.deepspeed.adapter.device_index", lambda *_: zero)
    monkeypatch.setattr("ddlbench.frameworks.deepspeed.adapter.all_ranks", lambda _: None)
    monkeypatch.setattr("ddlbench.frameworks.deepspeed.adapter.prepare_modules", lambda _: None)
    seen: list[str] = []

    def fail(**_: object) -> None:
        seen.append(os.environ["LOCAL_RANK"])
        raise torch.OutOfMemoryError("planted: too large")

    monkeypatch.setattr(deepspeed, "initialize", fail)
    with pytest.raises(torch.OutOfMemoryError):
        DeepSpeed().setup(replace(job(), global_batch=2, micro_batch=None))
    assert (seen, os.environ["LOCAL_RANK"]) == (["0"], "3")


def test_on_the_cpu_the_local_rank_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher's variables do not say it."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with device_index(torch.device("cpu"), local_rank=2):
        assert os.environ["LOCAL_RANK"] == "2"


@pytest.mark.slow
def test_its_own_mixed_precision_trains_nearly_the_same(results: Found) -> None:
    expected = reference(SIXTEEN, 2)
    for framework, outcome in zip(CASTS, results["casts"], strict=True):
        # The library rounds the first weights too, and keeps gradients in 16 bits.
        assert 1e-3 < distance(outcome.weights, expected) <= 0.1, framework
        assert {tensor.dtype for tensor in outcome.weights.values()} == {torch.float32}


@pytest.mark.slow
def test_training_continues_from_a_loaded_state(results: Found) -> None:
    for framework, (start, after, loaded, again) in zip(ROUNDS, results["rounds"], strict=True):
        assert norm([after - start]) > 1e-3, framework
        assert torch.equal(loaded, start), framework
        torch.testing.assert_close(again, after, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_an_overflow_in_fp16_is_no_update(results: Found) -> None:
    updates, weights = results["overflow"]
    assert updates == [0, 0, 1]
    assert torch.equal(weights[0], weights[1])
    assert norm([weights[2] - weights[1]]) > 1e-3


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    lamb = partial(make_optimizer, OptimizerConfig("lamb", lr=0.1))
    with pytest.raises(Unsupported, match=r"Lamb with framework\.zero_stage=1: it needs the norm of each full layer"):
        DeepSpeed().check(two_ranks(optimizer=lamb))
    with pytest.raises(
        Unsupported, match=r"precision=fp16 with framework\.zero_stage=2: .* does not lower the loss scale"
    ):
        DeepSpeed(zero_stage=2).check(two_ranks(precision="fp16"))
    with pytest.raises(Unsupported, match=r"reduce_dtype=fp16 with framework\.zero_stage=1: .*precision=bf16"):
        DeepSpeed().check(two_ranks(precision="bf16", reduce_dtype="fp16"))
    own = DeepSpeed(zero_stage=3, mixed_precision="weights")
    own.check(two_ranks(precision="bf16", reduce_dtype="fp16", model=MODEL))
    refused(own, two_ranks(precision="fp16", model=MODEL), "has no weights in fp16 on CPU")
    with pytest.raises(Unsupported, match=r"mixed_precision=weights with framework\.zero_stage=3: BatchNorm"):
        own.check(two_ranks(precision="bf16", model=MODELS["resnet"]))
    refused(DeepSpeed(), two_ranks(compile=True, checkpoint_activations=True), "cannot be combined")
    refused(DeepSpeed(zero_stage=3), two_ranks(compile=True), r"train\.compile with framework\.zero_stage=3")
    refused(DeepSpeed(zero_stage=0), two_ranks(reduce_dtype="bf16"), "bf16 need NCCL")
    refused(DeepSpeed(), two_ranks(global_batch=5), r"global_batch=5 does not divide over 2 replicas", UserError)
    DeepSpeed(zero_stage=0).check(two_ranks(optimizer=lamb))
    for precision in ("fp32", "bf16"):
        DeepSpeed(zero_stage=3).check(two_ranks(precision=precision))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"zero_stage": 4}, r"framework\.zero_stage=4 must be one of 0, 1, 2, 3"),
        ({"reduce_bucket_mb": 0.0}, r"framework\.reduce_bucket_mb=0\.0 must be greater than 0, or null"),
        ({"persistence_threshold": -1}, r"framework\.persistence_threshold=-1 must be 0 or more"),
        ({"zero_stage": 0, "offload_optimizer": True}, r"offload_optimizer=True needs framework\.zero_stage=1 or more"),
        ({"zero_stage": 2, "offload_parameters": True}, r"offload_parameters=True needs .*=3 or more, not 2"),
        ({"zero_stage": 0, "reduce_bucket_mb": 25.0}, r"reduce_bucket_mb=25\.0 needs framework\.zero_stage=1"),
        ({"gather_bucket_mb": -1.0}, r"framework\.gather_bucket_mb=-1\.0 must be greater than 0, or null"),
        ({"mixed_precision": "half"}, r"mixed_precision=half must be one of autocast, weights"),
        ({"zero_stage": 0, "mixed_precision": "weights"}, r"mixed_precision=weights needs framework\.zero_stage=1"),
        ({"zero_stage": 1, "cpu_adam": True}, r"cpu_adam needs framework\.offload_optimizer=true"),
        ({"zero_stage": 3, "offload_to": "disk"}, r"offload_to=disk must be one of cpu, nvme"),
        (
            {"zero_stage": 3, "offload_to": "nvme", "nvme_path": "/"},
            r"offload_to=nvme needs framework\.zero_stage=3, .*",
        ),
        (
            {"zero_stage": 2, "offload_to": "nvme", "nvme_path": "/", "offload_optimizer": True},
            r"offload_to=nvme needs framework\.zero_stage=3",
        ),
        ({"zero_stage": 3, "nvme_path": "/"}, r"nvme_path needs framework\.offload_to=nvme"),
        ({"zero_stage": 0, "overlap_comm": True}, r"overlap_comm=True needs framework\.zero_stage=1"),
    ],
)
def test_a_wrong_knob_names_itself(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeepSpeed(**knobs)


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    refused(DeepSpeed(), two_ranks(), r"pip install 'ddlbench\[deepspeed\]'", Unavailable)


PROGRAM = [
    "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddlbench", "+model=resnet50",
    "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32", "loader=synthetic", "progress=false",
    "train.global_batch=8", "train.micro_batch=2", "train.steps=2", "train.epochs=1", "data.val_limit=6",
]  # fmt: skip


@pytest.mark.slow
def test_the_program_runs_it_under_torchrun(tmp_path: Path) -> None:
    done = run(PYTHON, *PROGRAM, "+framework=zero3", "train.precision=bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepspeed" not in (done.stdout + done.stderr).lower()
    assert "accelerator" not in done.stdout + done.stderr
    content = record(tmp_path)
    assert content["status"] == "ok"
    assert content["ledger"]["updates"] == 2
    assert content["framework"] | {"zero_stage": 3, "precision_scheme": "autocast"} == content["framework"]
