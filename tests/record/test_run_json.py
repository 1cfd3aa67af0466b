"""The sections of run.json that are counted rather than copied, and the advice at the start of a run on a GPU, with
torch's switches; no GPU is touched."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.config.compose import configuration, make_job
from ddlbench.config.keys import Train
from ddlbench.config.schema import Config
from ddlbench.cores import few_cores
from ddlbench.job import Job
from ddlbench.measure.devices.environment import environment, machine
from ddlbench.models.gpt2 import GPT2
from ddlbench.ranks.launch import Launch
from ddlbench.record.run_json import advice, advice_on_waiting, model_section
from ddlbench.run.settings import set_switches
from tests.support.jobs import checkpoint_all
from tests.support.runs import SMALL, record

TINY = GPT2("gpt2_small", n_layer=1, n_embd=8, n_head=2, vocab_size=11, seq_len=4)


def test_flops_of_a_sample_are_those_of_forward_and_backward() -> None:
    """By hand: 2 for a multiply-accumulate of 4 tokens of width 8, the backward pass twice the forward one."""
    projections = 2 * 4 * 8 * (3 * 8 + 8 + 4 * 8 + 4 * 8)
    attention = 2 * 2 * 4 * 4 * 8
    head = 2 * 4 * 8 * 11
    section = model_section(TINY, TINY.build().state_dict())
    assert section["flops_per_sample"] == 3 * (projections + attention + head)
    assert section["tokens_per_sample"] == 4
    assert "flops_per_sample" not in model_section(TINY, None), "a model that was not built"


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    plain = model_section(TINY, TINY.build().state_dict())
    again = model_section(TINY, TINY.build().state_dict(), checkpoint_all)
    assert again["flops_per_sample"] == plain["flops_per_sample"] == plain["hardware_flops_per_sample"]
    assert again["hardware_flops_per_sample"] > plain["hardware_flops_per_sample"]


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


RESNET = ("+model=resnet50", "train.compile=true", "recipe.optimizer.fused=true")  # nothing else to advise
OF_GPT2 = ("+model=gpt2_small", "train.compile=true", "recipe.optimizer.fused=true", "model.dropout=0")
BF16 = "train.precision=bf16"


def advice_for(*overrides: str, framework: str = "single", device: torch.device = GPU) -> list[str]:
    config = composed(*overrides, framework=framework)
    return advice(config, job_of(config, device), {})


def composed(*overrides: str, framework: str = "single") -> Config:
    return configuration(f"+framework={framework}", *overrides)


def job_of(config: Config, device: torch.device) -> Job:
    ranks = 1 if config.framework.name == "single" else 2
    return make_job(config, Launch("torchrun", world_size=ranks, local_world_size=ranks), device)


PADDED = "model.pad_vocab_to_multiple=128"


@pytest.mark.parametrize(
    ("words", "advised", "followed"),
    [
        (RESNET, r"train\.tf32=true \(10 bits of mantissa.*train\.precision=bf16", "train.tf32=true"),
        ((*OF_GPT2, BF16), rf"^a vocabulary of 50,257 does not fill tensor cores: {PADDED}.*the 47 tokens", PADDED),
        ((*RESNET, "train.precision=fp16"), r"train\.channels_last=true", "train.channels_last=true"),
        (("+model=vgg16", *RESNET[1:], BF16), r"train\.channels_last=true", "train.channels_last=true"),
        (
            (*OF_GPT2[:-1], BF16, PADDED),
            r"^model\.dropout=0\.1 draws random numbers.*model\.dropout=0 is faster",
            "model.dropout=0",
        ),
    ],
)
def test_advice_is_one_line_and_none_where_it_is_followed(words: tuple[str, ...], advised: str, followed: str) -> None:
    (line,) = advice_for(*words)
    assert re.search(advised, line)
    assert advice_for(*words, followed) == []


@pytest.mark.parametrize("framework", ["horovod", "zero_bubble"])
def test_a_layout_of_images_that_is_refused_is_not_advised(framework: str) -> None:
    assert not any("channels_last" in line for line in advice_for(*RESNET[:1], BF16, framework=framework))


@pytest.mark.parametrize(
    ("framework", "words", "advised"),
    [
        ("single", (), ["train.compile=true", "recipe.optimizer.fused=true"]),
        ("single", ("train.checkpoint_activations=true",), ["recipe.optimizer.fused=true"]),
        ("single", ("recipe.optimizer.name=lamb",), ["train.compile=true"]),
        ("single", ("recipe.optimizer.fused=false",), ["train.compile=true"]),
        ("fsdp", (), ["train.compile=true"]),  # torch's fused SGD does not support shards
        ("fsdp", ("recipe=adamw",), ["train.compile=true", "recipe.optimizer.fused=true"]),
        ("tensor", (), ["recipe.optimizer.fused=true"]),
    ],
)
def test_what_the_framework_takes_is_advised(framework: str, words: tuple[str, ...], advised: list[str]) -> None:
    result = advice_for("+model=resnet50", BF16, "train.channels_last=true", *words, framework=framework)
    assert [line.split()[0] for line in result] == advised


def test_dali_is_advised_where_the_gpu_waits_for_images() -> None:
    native, dali = (composed("+model=resnet50", f"loader={name}") for name in ("native", "dali"))
    (line,) = advice_on_waiting(native, "cuda", 0.34)
    assert line.startswith("34% of the steps' time is waiting for data: loader=dali")
    rest: list[Any] = [(native, "cuda", 0.1), (native, "cuda", None), (native, "cpu", 0.34), (dali, "cuda", 0.34)]
    rest.append((composed("+model=gpt2_small"), "cuda", 0.34))
    assert [advice_on_waiting(*case) for case in rest] == [[]] * 5


def test_a_cpu_gets_no_advice_and_a_loader_alone_on_its_cores_only() -> None:
    assert advice_for("+model=gpt2_small", device=CPU) == []
    alone = replace(composed("+model=resnet50"), mode="loader")
    assert advice(alone, job_of(alone, GPU), {"cores": 8, "workers": 6}) == []
    assert advice(alone, job_of(alone, GPU), {"cores": 2, "workers": 6}) == [few_cores(2, 6)]


def test_a_rank_with_fewer_cores_than_its_loader_needs_gets_advice() -> None:
    tuned = composed(*RESNET, BF16, "train.channels_last=true")
    assert advice(tuned, job_of(tuned, GPU), {"cores": 3, "threads": 1}) == []
    assert advice(tuned, job_of(tuned, GPU), {"cores": 1, "threads": 1}) == [few_cores(1, 1)]
    assert advice(tuned, job_of(tuned, CPU), {"cores": 1, "threads": 1}) == []


@pytest.fixture
def restored() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.mark.usefixtures("restored")
def test_cudnn_benchmark_is_on_by_default_on_a_gpu_alone() -> None:
    result: list[bool] = []
    for device, asked in ((CPU, None), (GPU, False), (GPU, True), (GPU, None)):
        torch.backends.cudnn.benchmark = False
        set_switches(Train(cudnn_benchmark=asked), device)
        result.append(machine(CPU)["switches"]["cudnn_benchmark"])
    assert result == [False, False, True, True]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_deterministic_sets_every_switch_and_the_environment_has_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on a GPU: of cuda only the switches are set here."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.backends.cudnn.benchmark = False
    try:
        set_switches(Train(deterministic=True), device)
        result = environment(CPU)
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    names = ("deterministic_algorithms", "cudnn_deterministic", "cudnn_benchmark")
    assert [result["switches"][name] for name in names] == [True, True, False]
    assert result["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_record_has_the_advice_and_rank_0_prints_it(
    ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ddlbench.record.recorder.advice", lambda config, job, loader: [f"{config.mode} on {job.device.type}"]
    )
    monkeypatch.setattr(
        "ddlbench.record.recorder.advice_on_waiting",
        lambda config, device, share: [f"waited on {device}: {0 <= share <= 1}"],
    )
    code, said = ddlbench(*SMALL, "train.epochs=1")
    assert code == 0, said
    assert said.count("advice: train on cpu") == 1
    content = record(tmp_path)
    assert said.count("advice: waited on cpu: True") == 1
    assert content["advice"] == ["train on cpu", "waited on cpu: True"]
    assert json.dumps(content["config"]["train"]["cudnn_benchmark"]) == "null"
    assert content["model"]["vocabulary"] is None
