"""No step waits for its device but where docs/host-synchronizations.md says so."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework
from ddlbench.ranks.launch import connect, disconnect
from ddlbench.ranks.launchers import detect
from tests.equality.cases import CASES, MODELS, at
from tests.support.equal import batch_for, make_job
from tests.support.processes import run
from tests.support.ranks import run_ranks
from tests.support.reference import Case
from tests.support.syncs import Found, count_all, counted

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "host-synchronizations.md"
COUNTED = [at(2, case) for case in CASES if re.fullmatch(r"(gpt2|resnet)-(fp32|bf16)-accumulated", case.name)]
COUNTED += [at(2, Case("gpt2-clipped", MODELS["gpt2"], micro_batch=2, clip_norm=0.5))]
COUNTED += [at(2, Case("gpt2-fp16", MODELS["gpt2"], precision="fp16", micro_batch=2))]


@cache
def results() -> list[Found]:
    return run_ranks(2, count_all, COUNTED)


WHEN = {"always": "", "clipping": "clipped", "fp16": "fp16"}  # the page's word -> what is in the names of its cases


def allowed(framework: str, case: str) -> Counter[str]:
    """The page's rows of a framework in a case: call -> how often at most."""
    rows = re.findall(r"^\| ([\w, -]+) \| (\w+) \| (\w+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows
    fitting = [row for row in rows if framework in row[0].split(", ") and WHEN[row[1]] in case]
    return Counter({call: int(most) for _, _, call, most in fitting})


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.name for case in COUNTED])
def test_a_step_waits_only_where_the_page_says_so(case: str) -> None:
    names = [name for of, name in results()[0] if of == case]
    assert {"ddp", "fsdp", "zero0", "gpipe", "tensor", "hybrid-shards"} <= {*names}
    for rank in results():
        unlisted = {name: dict(rank[case, name] - allowed(name, case)) for name in names}
        assert not any(unlisted.values()), {name: calls for name, calls in unlisted.items() if calls}


def test_every_kind_of_call_is_noticed() -> None:
    tensor = torch.ones(3)
    with counted() as counts:
        bool(tensor[0] > 0), float(tensor[0]), tensor[0].item()
        tensor.nonzero(), tensor[tensor > 0], torch.equal(tensor, tensor)
        tensor.cpu(), tensor.tolist(), tensor.numpy(), torch.tensor([1.0])
    assert counts == {"item": 3, "nonzero": 2, "equal": 1, "cpu": 1, "tolist": 1, "numpy": 1, "tensor": 1}


def test_a_call_within_the_backward_pass_is_noticed() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * gradient.sum().item())
    with counted() as counts:
        model(torch.ones(1, 2)).sum().backward()
    assert counts == {"item": 1}


ON_ONE_GPU: dict[str, Framework] = {
    "single": Single(),
    "ddp": DDP(),
    "fsdp": FSDP(),
    "local_sgd": LocalSGD(),
    "gpipe": Pipeline(),
    "tensor": TensorParallel(),
    **{f"zero{stage}": DeepSpeed(zero_stage=stage) for stage in range(4)},
}


FORK_AFTER_PRELOAD = """
import os, sys, torch
torch.cuda.device_count = lambda: 1  # as NVML counts where there is a GPU
import tests.support.preload
if os.fork() == 0:
    os._exit(torch.cuda._is_in_bad_fork())
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.slow  # it imports what most ranks import, once more
def test_ranks_that_the_tests_fork_may_use_a_gpu() -> None:
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}  # as under a DeepSpeed that does not set it
    done = run(sys.executable, "-c", FORK_AFTER_PRELOAD, cwd=ROOT, **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["gpt2", "resnet"])
@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_a_step_on_a_gpu_waits_only_where_the_page_says_so(name: str, model: str, precision: str) -> None:
    case = Case("gpu", MODELS[model], precision, micro_batch=3, global_batch=6)
    (reported,) = run_ranks(1, waits_on_gpu, case, ON_ONE_GPU[name])
    assert len(reported) <= allowed(name, case.name).total(), reported


def waits_on_gpu(case: Case, framework: Framework) -> list[str]:
    """Where torch reports that the third step on cuda:0 waits."""
    device = torch.device("cuda", 0)
    disconnect(clean=True)  # from a group for the CPU alone
    connect(detect(), device, 60.0)
    job = replace(make_job(case), device=device)
    framework.check(job)
    trainer = framework.setup(job)
    batch = batch_for(job, trainer.place)
    assert batch is not None
    batch = batch.to(device)
    for _ in range(2):
        trainer.step(batch)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.step(batch)
        torch.cuda.set_sync_debug_mode("default")
    trainer.close()
    return [f"{one.filename}:{one.lineno}" for one in reported if "synchronizing CUDA operation" in str(one.message)]
