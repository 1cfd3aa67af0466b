"""One rank of jobs that were not started: what it holds, sends and reads, against sums by hand."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration, configurations
from ddlbench.frameworks.shared.replica import Replica
from ddlbench.frameworks.single import Single
from ddlbench.job import Job
from ddlbench.oracle.rehearsal import Rehearsal, answer, main, rehearse
from ddlbench.ranks.launch import Launch

WORLD = 8
MODELS = {
    "gpt2_small": ("model.n_layer=3", "model.n_embd=32", "model.n_head=4", "model.vocab_size=64", "model.seq_len=16"),
    "resnet50": ("model.layers=[1,1,1,1]", "model.width_per_group=16", "model.image_size=64"),
    "vgg16": ("model.channels=[16,32,64,64,64]", "model.hidden=256", "model.image_size=64"),
}
LAYOUTS = {
    "tensor": ("framework.tp=4", "framework.dp=2"),
    "hybrid": ("framework.tp=2", "framework.pp=2", "framework.dp=2"),
    **dict.fromkeys(("gpipe", "1f1b", "zero_bubble", "pipedream_2bw"), ("framework.dp=2",)),
    "interleaved": ("framework.dp=4",),
    "pipedream": ("framework.dp=8",),
}
# Frameworks of which a step is not rehearsed, with a word of the reason.
NO_STEP = dict.fromkeys(("ddp", "local_sgd", "tensor"), "reducer") | {"zero3": "stage 3", "horovod": "peers"}
NOTHING_ON_CUDA = {"zero0", "zero1", "zero2", "zero3", "deepspeed", "horovod"}
FRAMEWORKS = [name for name in choices("framework") if name != "single"]


def words(framework: str, model: str, *more: str) -> list[str]:
    size = (f"+framework={framework}", f"+model={model}", *MODELS[model], "train.batch_per_gpu=4")
    return [*size, f"gpus={WORLD}", *LAYOUTS.get(framework, ()), *more]


@cache
def gpt2_bytes() -> int:
    """Of the weights in fp32; the tied embedding once."""
    with configurations():
        model = configuration(*words("single", "gpt2_small")[:7]).model.build()
    return 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model", ["gpt2_small", *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS if each != "gpt2_small")]
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_answers(framework: str, model: str) -> None:
    found = answer(words(framework, model))
    assert found.error is None
    if framework in NO_STEP:
        assert found.left_out is not None
        assert NO_STEP[framework] in found.left_out
        assert found.collectives is found.host_reads is None
    else:
        assert found.left_out is None
        assert found.collectives
        assert found.memory is not None
        assert all(found.memory.values()), "parameters, gradients and optimizer"


@pytest.mark.parametrize(
    "framework",
    [name for name in FRAMEWORKS if name not in ("zero0", "zero1", "zero2", "zero3", "deepspeed", "horovod")],
)
def test_on_a_gpu_that_is_not_there_the_setup_is_rehearsed(framework: str) -> None:
    found = answer(words(framework, "gpt2_small", "device=cuda"))
    assert (found.device, found.error, found.collectives) == ("cuda", None, None)
    assert found.memory is not None
    assert found.memory["parameters"]
    assert found.memory["gradients"] is found.memory["optimizer"] is None, "unknown, for there is no step"
    assert "asks the driver" in str(found.left_out)


def test_shards_by_hand() -> None:
    """FSDP with AdamW: an eighth of everything; each weight is gathered for both passes, but the last block's once."""
    found, whole = answer(words("fsdp", "gpt2_small")), gpt2_bytes()
    assert found.memory is not None
    assert found.collectives is not None
    steps = 4 * 40  # AdamW's step counter of each of the 40 parameters
    eighth = whole // WORLD
    assert found.memory == {"parameters": eighth, "gradients": eighth, "optimizer": 2 * eighth + steps}
    assert found.collectives["reduce_scatter_base"]["bytes"] == whole
    assert whole < found.collectives["allgather_base"]["bytes"] < 2 * whole


def test_stages_of_zero_by_hand() -> None:
    """Every stage below 3 keeps the whole weights; 2 keeps a part of the gradients only."""
    whole = gpt2_bytes()
    for stage in (0, 1, 2):
        memory = answer(words(f"zero{stage}", "gpt2_small")).memory
        assert memory is not None
        assert memory["parameters"] == whole
        gradients = memory["gradients"]
        assert gradients is not None
        assert gradients == whole if stage == 0 else gradients < whole / 2 if stage == 2 else gradients > 0


def test_tensor_parallel_layers_by_hand() -> None:
    """3 blocks sum 2 outputs and 2 gradients of 4 x 16 x 32 numbers each; embedding and loss come on top."""
    small = ("+model=gpt2_small", *MODELS["gpt2_small"], "train.global_batch=4")
    found = answer(["+framework=tensor", *small, "framework.tp=4", "gpus=4"])
    assert found.collectives is not None
    assert found.collectives["allreduce"]["count"] >= 12
    assert found.collectives["allreduce"]["bytes"] >= 12 * 4 * 16 * 32 * 4


@dataclass
class Broken(Single):
    """A product of matrices that do not fit together."""

    def setup(self, job: Job) -> Replica:
        return torch.zeros(2, 3, device=job.device) @ torch.zeros(4, 5, device=job.device)  # pyright: ignore


@dataclass
class Reading(Single):
    """A step that reads its loss."""

    def setup(self, job: Job) -> Replica:
        trainer: Any = super().setup(job)
        step = trainer.step
        trainer.step = lambda batch: step(batch).item()
        return trainer


def with_framework(framework: Any, device: str = "cpu") -> Rehearsal:
    with configurations():
        config = replace(configuration(*words("single", "gpt2_small")[:7]), framework=framework)
    return rehearse(config, Launch("alone"), torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_that_do_not_fit_are_one_line(device: str) -> None:
    found = with_framework(Broken("single"), device)
    assert found.error is not None
    assert "[2, 3]" in found.error
    assert "[4, 5]" in found.error
    assert "\n" not in found.error


def test_a_number_that_the_host_reads_has_its_line() -> None:
    found = with_framework(Reading("single"))
    assert found.host_reads is not None
    line = Reading.setup.__code__.co_firstlineno + 3
    assert found.host_reads[f"item at test_rehearsal.py:{line}"] == 1


def test_the_command_prints_json_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words("gpipe", "gpt2_small", "rank=7"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["coordinates"]) == (7, {"dp": 1, "pp": 3})
    assert main(words("gpipe", "gpt2_small")) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpipe, gpt2_small: rank 0 of 8 on cpu (dp 0, pp 0)\n")
    assert "collective of a step: send: " in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("rank=8",), "rank=8 must be a number from 0 to 7"),
        (("device=tpu",), "device=tpu must be cpu or cuda"),
        (("framework.nothing=1",), "framework.nothing does not exist"),
        (("--nothing",), "unrecognized arguments: --nothing"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str) -> None:
    assert main([*words("gpipe", "gpt2_small"), *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow  # 15 s
def test_one_of_1024_ranks_answers_in_under_a_minute() -> None:
    """The process's own seconds, which other work does not move."""
    began = time.process_time()
    degrees = ("framework.dp=64", "framework.tp=4", "framework.pp=4")
    found = answer(["+framework=hybrid", "+model=gpt2_small", *degrees, "gpus=1024"])
    assert time.process_time() - began < 60
    assert found.coordinates == {"dp": 0, "pp": 0, "tp": 0}
    assert found.error is found.left_out is None
    assert found.memory is not None
    assert found.collectives is not None
    assert found.memory["parameters"] == found.memory["gradients"]
    assert found.collectives["send"]["count"] == found.collectives["recv"]["count"]
