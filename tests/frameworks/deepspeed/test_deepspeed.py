"""What ZeRO does to the library and its variables, and what it refuses; that it trains what one process trains is
tested in tests/equality/."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ddlbench.errors import Unavailable, UserError
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed, device_index
from ddlbench.frameworks.deepspeed.knobs import import_deepspeed
from ddlbench.frameworks.shared.environment import environment
from ddlbench.recipe.optimizers import OptimizerConfig, make_optimizer
from tests.equality.cases import MODELS
from tests.equality.distances import norm
from tests.frameworks.deepspeed.zero import both_loops, no_disk, norms, on_one_visible_gpu, overflow
from tests.support.jobs import CASE, job, refused, two_ranks
from tests.support.processes import PYTHON, run
from tests.support.ranks import results, run_ranks
from tests.support.runs import record


@pytest.fixture(scope="module")
def one_gpu() -> list[dict[str, Any]]:
    return run_ranks(1, on_one_visible_gpu)[0]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What rank 0 of two found. The overflow is last: the library remembers in a global that a run was in fp16."""
    norm_of = {"norms": partial(norms, None), "norms when clipping": partial(norms, 0.5)}
    return run_ranks(2, results, {"loops": both_loops, **norm_of, "disk": no_disk, "overflow": overflow})[0]


def test_a_version_with_known_wrong_results_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_deepspeed(torch.device("cpu")), "__version__", "0.19.7")
    with pytest.raises(Unavailable, match=r"deepspeed 0.19.7 is older than 0.19.8: pip install"):
        import_deepspeed(torch.device("cpu"))


def test_works_on_this_device_after_an_import_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps one accelerator for the process: a rehearsal of GPUs may come before a run on the CPU."""
    accelerator = import_deepspeed(torch.device("cpu")).accelerator
    monkeypatch.setattr(accelerator.real_accelerator, "ds_accelerator", accelerator.get_accelerator())
    for device in ("cuda", "cpu", "cuda"):
        import_deepspeed(torch.device(device, 0))
        assert accelerator.get_accelerator().device_name() == device


def test_equals_deepspeeds_own_documented_loop(found: dict[str, Any]) -> None:
    for stage, (ours, theirs) in enumerate(found["loops"]):
        assert torch.equal(ours, theirs), (stage, norm([ours - theirs]))


def test_the_gradients_norm_is_computed_for_clipping_only(found: dict[str, Any]) -> None:
    assert found["norms"] == [(0, False)] * 4
    assert found["norms when clipping"] == [(1, True)] * 4


def test_gradients_travel_during_the_backward_pass_on_gpus() -> None:
    gpu = torch.device("cuda", 0)
    by_stage = {
        device: [DeepSpeed(zero_stage=stage).overlaps(two_ranks(device=device)) for stage in range(4)]
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
    for stage, result in enumerate(one_gpu):
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


def test_an_overflow_in_fp16_is_no_update(found: dict[str, Any]) -> None:
    updates, weights = found["overflow"]
    assert updates == [0, 0, 1]
    assert torch.equal(weights[0], weights[1])
    assert norm([weights[2] - weights[1]]) > 1e-3


def test_a_folder_that_one_node_lacks_is_an_error_of_all_ranks(found: dict[str, Any]) -> None:
    """The ranks of other nodes would wait for one that raised alone until their timeout."""
    assert re.fullmatch(r"framework\.nvme_path=/planted is no folder of \S+: make it on every node, .*", found["disk"])


def test_unsupported_settings_are_refused_before_anything_starts() -> None:
    own, text = DeepSpeed(zero_stage=3, mixed_precision="weights"), CASE.model
    own.check(two_ranks(precision="bf16", reduce_dtype="fp16", model=text))
    refused(own, two_ranks(precision="fp16", model=text), "has no weights in fp16 on CPU")
    batch_norm = two_ranks(precision="bf16", model=MODELS["resnet"])
    refused(own, batch_norm, r"mixed_precision=weights with framework\.zero_stage=3: BatchNorm")
    lamb = partial(make_optimizer, OptimizerConfig("lamb", lr=0.1))
    DeepSpeed(zero_stage=0).check(two_ranks(optimizer=lamb))


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


@pytest.mark.parametrize("largest", [2**13, 2**15])
def test_the_library_s_loss_scale_leaves_out_the_updates_that_torch_s_does(largest: int) -> None:
    """Gradients overflow at every scale above `largest`. Weights in fp16 train on GPUs alone."""
    import deepspeed.comm
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    own = DeepSpeed(zero_stage=2, mixed_precision="weights").config(two_ranks(precision="fp16"))["fp16"]
    given = DeepSpeedFP16Config(**own).dynamic_loss_scale_args()
    library = CreateLossScaler(torch.half, 1, True, given)
    scaler, weight = torch.amp.GradScaler("cpu"), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(torch.zeros(()))
    skipped: list[tuple[bool, bool]] = []
    with patch.object(deepspeed.comm, "get_rank", lambda: 1):  # rank 0 would log each overflow
        for _ in range(4100):
            skipped.append((library.loss_scale > largest, scaler.get_scale() > largest))
            library.update_scale(skipped[-1][0])
            weight.grad = torch.full((1,), float("inf") if skipped[-1][1] else 0.0)
            scaler.step(optimizer)
            scaler.update()
    assert all(one == other for one, other in skipped)
    assert sum(one for one, _ in skipped) > 2
