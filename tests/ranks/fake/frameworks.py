"""Which frameworks are tried as one rank of eight that do not exist, in which layout."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.job import Framework, Job
from tests.equality.cases import MODELS, RATES
from tests.support.equal import make_job
from tests.support.reference import Case
from tests.support.rehearsals import OF_IMAGES

JOB_CASE = Case("gpt2", MODELS["gpt2"], lr=0.02, global_batch=32)
WORLD = 8
LAYOUTS = {  # five blocks and four heads divide over at most five stages and four ranks
    "tensor": ["framework.tp=4", "framework.dp=2"],
    "megatron": ["framework.tp=4", "framework.dp=2"],
    "channel": ["framework.tp=4", "framework.dp=2"],
    "spatial": ["framework.sp=2", "framework.dp=4"],
    "hybrid": ["framework.tp=2", "framework.pp=2", "framework.dp=2"],
    **{name: ["framework.dp=2"] for name in ("gpipe", "1f1b", "zero_bubble", "pipedream_2bw")},
    **{name: ["framework.dp=4"] for name in ("interleaved", "looped_bfs", "zbv", "dualpipev")},
    "pipedream": ["framework.dp=8"],  # a tied embedding may not be on two stages
}
EVERY = choices("framework")
FRAMEWORKS = sorted(set(EVERY) - {"single", "horovod"} - OF_IMAGES)  # that train GPT-2
NO_STEP = {"ddp", "local_sgd", "tensor", "megatron"}


@cache
def frameworks() -> dict[str, Framework]:
    words = {name: (f"+framework={name}", "+model=gpt2_small", *LAYOUTS.get(name, [])) for name in EVERY}
    return {name: configuration(*chosen).framework for name, chosen in words.items()}


def framework(name: str) -> Framework:
    """A copy: what is set up with it stays in it."""
    return deepcopy(frameworks()[name])


def job_of(model: str, device: torch.device) -> Job:
    """A small job, within a fake world."""
    return replace(make_job(Case(model, MODELS[model], lr=RATES[model], global_batch=32)), device=device)
