"""train.compile=true: what torch.compile's own backend makes of every framework that takes it trains the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch._dynamo.utils import counters

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration, refusal, supports
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from tests.equality.cases import CASES, at, plain_process
from tests.equality.distances import TOLERANCES, assert_equal
from tests.support.equal import train_case
from tests.support.jobs import job
from tests.support.libraries import why_no_horovod
from tests.support.ranks import run_ranks
from tests.support.reference import Outcome
from tests.support.strategies import Strategy

WHOLE = {
    case.model.name: replace(at(2, case), compile=True)
    for case in CASES
    if case.name in ("gpt2-fp32-whole", "resnet-fp32-whole")
}
# Pipelines take micro batches of 2; the others the whole share of a replica.
STRATEGIES = [
    Strategy("ddp", DDP(), 2),
    Strategy("fsdp", FSDP(), 2),
    Strategy("local_sgd", LocalSGD(local_steps=1), 2),
    Strategy("parameter_server", ParameterServer(), 2),
    *(Strategy(f"zero{stage}", DeepSpeed(zero_stage=stage), 2) for stage in range(3)),
    *([] if why_no_horovod() else [Strategy("horovod", Horovod(), 2)]),
    Strategy("gpipe", Pipeline(), 1, micro_batch=2),
    Strategy("1f1b", Pipeline(schedule="1f1b"), 1, micro_batch=2),
    Strategy("interleaved", Pipeline(schedule="interleaved", virtual_stages=2), 1, micro_batch=2),
    Strategy("looped_bfs", Pipeline(schedule="looped_bfs", virtual_stages=2), 1, micro_batch=2),
    Strategy("hybrid-shards", Pipeline(dp=2, sharded=True), 2, micro_batch=2),
]


# A ResNet takes most of a minute to compile: once.
WORK = {("gpt2", strategy.name): strategy for strategy in STRATEGIES} | {("resnet", "ddp"): STRATEGIES[0]}


@dataclass(frozen=True)
class Compiled:
    """A training, and how many graphs this rank compiled for it."""

    outcome: Outcome
    graphs: int


def compiled() -> dict[tuple[str, str], Compiled]:
    # Beyond its limit torch would continue uncompiled, with hardly a message.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    result: dict[tuple[str, str], Compiled] = {}
    for (model, name), strategy in WORK.items():
        torch._dynamo.reset()
        counters.clear()
        outcome = train_case(WHOLE[model], strategy.framework)
        result[model, name] = Compiled(outcome, counters["stats"]["unique_graphs"])
    return result


@cache
def ranks() -> list[dict[tuple[str, str], Compiled]]:
    """All in one pair of processes: the frameworks share what torch.compile keeps of equal graphs."""
    return run_ranks(2, compiled)


@pytest.mark.slow  # four minutes of one core the first time
@pytest.mark.parametrize(("model", "name"), WORK)
def test_trains_what_an_uncompiled_process_trains(model: str, name: str) -> None:
    first, second = (rank[model, name] for rank in ranks())
    # One graph at least for training and one for validation, by every rank.
    assert min(first.graphs, second.graphs) >= 2
    strategy = WORK[model, name]
    expected = plain_process(WHOLE[model], strategy.replicas, strategy.micro_batch)
    assert_equal(first.outcome, expected, TOLERANCES[model, "fp32"])


def test_every_framework_that_takes_it_is_here() -> None:
    """Each in a layout of its own; a hybrid without tensor parallelism and a deepspeed are among the others."""
    asked = replace(job(), world_size=2, global_batch=8, micro_batch=None, compile=True)
    frameworks = {
        name: configuration("+model=gpt2_small", f"+framework={name}").framework for name in choices("framework")
    }
    taken = {name for name, framework in frameworks.items() if refusal(partial(supports, framework, asked)) is None}
    assert taken - {"deepspeed", "hybrid", "horovod"} == {each.name for each in STRATEGIES} - {
        "hybrid-shards",
        "horovod",
    }
