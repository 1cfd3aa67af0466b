"""train.compile=true: what torch.compile's own backend makes of every framework that takes it trains the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline import Pipeline
from ddlbench.frameworks.single import Single
from ddlbench.job import Framework
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from tests.equal import train_case
from tests.libraries import why_no_horovod
from tests.ranks import run_ranks
from tests.reference import Case, Outcome
from tests.strategies import Strategy
from tests.test_equal_training import TOLERANCES, assert_equal, plain_process

TEXT = Case(
    "gpt2",
    GPT2("gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0),
    compile=True,
    global_batch=12,
    steps=4,
)


# Pipelines take micro batches of 2; the others the whole share of a replica.
STRATEGIES = [
    Strategy("ddp", DDP(), 2),
    Strategy("fsdp", FSDP(), 2),
    Strategy("local_sgd", LocalSGD(local_steps=1), 2),
    *(Strategy(f"zero{stage}", DeepSpeed(zero_stage=stage), 2) for stage in range(3)),
    *([] if why_no_horovod() else [Strategy("horovod", Horovod(), 2)]),
    Strategy("gpipe", Pipeline(), 1, micro_batch=2),
    Strategy("1f1b", Pipeline(schedule="1f1b"), 1, micro_batch=2),
    Strategy("interleaved", Pipeline(schedule="interleaved", virtual_stages=2), 1, micro_batch=2),
    Strategy("hybrid-shards", Pipeline(dp=2, sharded=True), 2, micro_batch=2),
]


@dataclass(frozen=True)
class Compiled:
    """A training, and how many graphs this rank compiled for it."""

    outcome: Outcome
    graphs: int
    breaks: Mapping[str, int]


def compiled(work: Mapping[str, tuple[Case, Framework]]) -> dict[str, Compiled]:
    # Past its limit torch would silently go on uncompiled.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    found: dict[str, Compiled] = {}
    for name, (case, framework) in work.items():
        torch._dynamo.reset()
        counters.clear()
        outcome = train_case(case, framework)
        found[name] = Compiled(outcome, counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
    return found
