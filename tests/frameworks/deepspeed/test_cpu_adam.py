"""DeepSpeed's CPU Adam trains as torch's AdamW, and so do states on a disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import cpp_extension

from ddlbench.errors import Unavailable
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.deepspeed.knobs import check_op, import_deepspeed
from ddlbench.models.gpt2 import GPT2
from tests.equality.knobs import ADAMW, FALLING
from tests.frameworks.deepspeed.zero import samples, weights_of
from tests.support.changed_job import changed
from tests.support.equal import make_job, ready, train_cases
from tests.support.jobs import CASE, CPU, refused, two_ranks
from tests.support.ranks import run_ranks
from tests.support.reference import Outcome

WIDE = replace(cast(GPT2, CASE.model), n_embd=256)  # a file has 1 MiB or more


def compile_op(builder: str) -> None:
    """DeepSpeed compiles an operation at its first use, which takes a minute, and ranks must not wait for it."""
    import_deepspeed(CPU)
    try:
        check_op(builder, builder, "install g++, ninja and libaio-dev")
    except Unavailable as error:
        pytest.skip(str(error))
    load = f"from deepspeed.ops.op_builder import {builder}; {builder}().load()"
    subprocess.run([sys.executable, "-c", load], check=True, timeout=1200, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_as_torch_does(stage: int) -> None:
    """Four updates, two parameter groups, falling learning rates. The vectorized update rounds otherwise: after four
    updates of about 0.01 the weights differ by less than 1e-5 of that."""
    compile_op("CPUAdamBuilder")
    torch_s, own = run_ranks(2, with_both, stage)[0]
    off = max((weight - own.weights[name]).abs().max() for name, weight in torch_s.weights.items())
    assert 0 < off < 1e-5  # it was another optimizer


def with_both(stage: int) -> list[Outcome]:
    both = [DeepSpeed(zero_stage=stage, offload_optimizer=True, cpu_adam=chosen) for chosen in (False, True)]
    return train_cases([(FALLING, changed(each, **ADAMW)) for each in both])


@pytest.mark.slow
def test_states_on_a_disk_train_as_those_in_memory(tmp_path: Path) -> None:
    """ZeRO-Infinity (Rajbhandari et al. 2021): at stage 3 the optimizer's weights in fp32 and its two moments are in
    files between two updates."""
    compile_op("AsyncIOBuilder")
    keys: dict[str, Any] = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    on_disk = DeepSpeed(**keys, offload_to="nvme", nvme_path=str(tmp_path))
    ranks = run_ranks(2, with_files, [DeepSpeed(**keys), on_disk], str(tmp_path))
    (in_memory, none), (swapped, size) = ranks[0]
    assert torch.equal(in_memory, swapped)
    parameters = sum(parameter.numel() for parameter in WIDE.build().parameters())
    assert none == 0
    assert size > 0.9 * 3 * 4 * parameters  # of both ranks; small tensors stay in memory


def with_files(frameworks: Sequence[DeepSpeed], folder: str) -> list[tuple[Tensor, int]]:
    """The weights after three updates, and the bytes of the files after the second one."""
    results, size = list[tuple[Tensor, int]](), 0
    job = replace(make_job(replace(CASE, model=WIDE)), **ADAMW)
    for framework in frameworks:
        with ready(framework, job) as (trainer, _):
            for step in range(3):
                dist.barrier()
                size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
                dist.barrier()
                trainer.step(samples(job, step))
            results.append((weights_of(trainer), size))
    return results


def test_another_optimizer_is_refused() -> None:
    asked = DeepSpeed(zero_stage=1, offload_optimizer=True, cpu_adam=True)
    refused(asked, two_ranks(), r"framework\.cpu_adam=true with SGD: it computes AdamW alone")


def test_an_operation_that_does_not_work_here_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    import_deepspeed(CPU)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda _: False)
    asked = DeepSpeed(zero_stage=3, offload_optimizer=True, offload_to="nvme", nvme_path="/")
    refused(asked, two_ranks(), r"offload_to=nvme: DeepSpeed's async_io does not work .* libaio", Unavailable)
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda _: True)
    check_op("AsyncIOBuilder", "framework.offload_to=nvme", "install libaio")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    on_gpus = replace(two_ranks(), device=torch.device("cuda"))
    refused(asked, on_gpus, r"offload_to=nvme: .* there is no CUDA toolkit: load .* or set CUDA_HOME", Unavailable)
