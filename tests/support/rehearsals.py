"""Rehearsals of small jobs, and of many of them in a process of their own, whose memory and patches end with it.

python -m tests.support.rehearsals cuda gpt2_small ddp,fsdp,... train.precision=bf16
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

import torch

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import Unsupported
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import Rehearsal, rehearse
from tests.support.processes import PYTHON, run

WORLD = 8
MODELS = {
    "gpt2_small": ("model.n_layer=3", "model.n_embd=32", "model.n_head=4", "model.vocab_size=64", "model.seq_len=16"),
    "resnet50": ("model.layers=[1,1,1,1]", "model.width_per_group=16", "model.image_size=64"),
    "vgg16": ("model.channels=[16,32,64,64,64]", "model.hidden=256", "model.image_size=64"),
}
OF_IMAGES = {"channel", "spatial"}  # refuse models of text
OF_TEXT = {"megatron"}
FEW = "train.micro_batch=4"  # four in a step, or two of interleaved; the default of 4 a rank takes as many times longer
LAYOUTS = {
    **dict.fromkeys(("tensor", "megatron", "channel"), ("framework.tp=4", "framework.dp=2")),
    "spatial": ("framework.sp=2", "framework.dp=4"),
    "hybrid": ("framework.tp=2", "framework.pp=2", "framework.dp=2", FEW),
    **dict.fromkeys(("gpipe", "1f1b", "zero_bubble", "pipedream_2bw"), ("framework.dp=2", FEW)),
    **dict.fromkeys(("interleaved", "looped_bfs"), ("framework.dp=4", FEW)),
    **dict.fromkeys(("zbv", "dualpipev"), ("framework.dp=4", "train.micro_batch=2")),  # they need one for each stage
    "pipedream": ("framework.dp=8",),
}


def words(framework: str, model: str, *more: str) -> list[str]:
    size = (f"+framework={framework}", f"+model={model}", *MODELS[model], "train.batch_per_gpu=4")
    return [*size, *LAYOUTS.get(framework, ()), *more]


def config(framework: str, model: str, *more: str) -> Config:
    return configuration(*words(framework, model, *more))


@cache
def rehearsed(framework: str, model: str, *more: str, rank: int = 0, device: str = "cpu") -> Rehearsal:
    """In this process, each job once: several tests look at one rehearsal."""
    launch = Launch("torchrun", rank, WORLD, rank, WORLD)
    return rehearse(config(framework, model, *more), launch, torch.device("cuda:0" if device == "cuda" else "cpu"))


def apart(device: str, model: str, frameworks: list[str], *more: str) -> dict[str, dict[str, Any]]:
    """The rehearsal of each framework, made in another process and read from its JSON."""
    done = run(PYTHON, "-m", "tests.support.rehearsals", device, model, ",".join(frameworks), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def row(device: str, model: str, framework: str, *more: str) -> dict[str, Any]:
    """As JSON has it; `refused`: why there is none."""
    try:
        return rehearsed(framework, model, *more, device=device).printed()
    except Unsupported as refusal:
        return {"refused": str(refusal)}


if __name__ == "__main__":
    _, device, model, names, *more = sys.argv
    print(json.dumps({name: row(device, model, name, *more) for name in names.split(",")}))
