"""The limits in which a strategy becomes another: p = 1 is serial, one stage is serial or data, tp = 1 is data."""

from __future__ import annotations

from typing import Any

import pytest

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Model
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.setting import Outcome
from tests.oracle.made import GPT, VGG16, setting

OF_IMAGES = [TensorParallel(convolutions="channels", tp=1), Spatial(sp=1)]
ON_ONE_RANK = [
    DDP(),
    Horovod(),
    LocalSGD(),
    FSDP(),
    FSDP(reshard_after_forward=False),
    *(DeepSpeedOptions(zero_stage=stage) for stage in range(4)),
    TensorParallel(tp=1),
    *OF_IMAGES,
    *(Pipeline(schedule=name, pp=1) for name in ("gpipe", "1f1b")),
    Pipeline(schedule="1f1b", dp=1, tp=1, pp=1, sharded=True),
    PipeDream(pp=1),
    PipeDream(pp=1, double_buffered=True),
]
AS_REPLICAS = [
    TensorParallel(dp=4, tp=1),
    TensorParallel(dp=4, tp=1, sequence_parallel=True),
    TensorParallel(convolutions="channels", dp=4, tp=1),
    Spatial(dp=4, sp=1),
    *(Pipeline(schedule=name, dp=4, pp=1) for name in ("gpipe", "1f1b")),
    Pipeline(schedule="gpipe", dp=4, tp=1, pp=1),
    FSDP(replicate=4),
    DeepSpeedOptions(zero_stage=0),
]


def name(framework: Any) -> str:
    return "-".join(map(str, vars(framework).values()))


def sent(outcome: Outcome) -> float:
    return sum(message.bytes_ for message in outcome.messages)


@pytest.mark.parametrize(
    ("framework", "model"),
    [(framework, VGG16) for framework in ON_ONE_RANK]
    + [(framework, GPT) for framework in ON_ONE_RANK if framework not in OF_IMAGES],
    ids=lambda value: value.name if value in (VGG16, GPT) else name(value),
)
def test_one_rank_is_serial(framework: Any, model: Model) -> None:
    """Equal seconds and weights, nothing sent, no bubble."""
    given = setting(1, model=model, micro_batch=4)
    outcome, serial = strategy(framework, given), strategy(Single(), given)
    assert outcome.step_s == pytest.approx(serial.step_s)
    assert (outcome.messages, outcome.bubble_s) == ((), 0)
    assert outcome.memory.weights >= serial.memory.weights
    if not isinstance(framework, Pipeline | PipeDream | DeepSpeedOptions):  # ZeRO 3 keeps small weights twice
        assert outcome.memory.weights == serial.memory.weights


@pytest.mark.parametrize("framework", AS_REPLICAS, ids=name)
def test_replicas_of_one_rank_are_data_parallelism(framework: Any) -> None:
    """4 replicas of one stage, one part, one shard: they compute and send what DDP does; a pipeline's gradients are
    sent after its schedule, so nothing of them is hidden there."""
    given = setting(4, model=VGG16, micro_batch=2)
    outcome, data = strategy(framework, given), strategy(DDP(), given)
    assert outcome.compute_s == pytest.approx(data.compute_s)
    assert outcome.bubble_s == 0
    assert sent(outcome) == pytest.approx(sent(data))
    assert outcome.memory.weights == pytest.approx(data.memory.weights)
    if isinstance(framework, TensorParallel | Spatial):
        assert (outcome.step_s, outcome.hidden_s) == pytest.approx((data.step_s, data.hidden_s))
        assert outcome.memory == data.memory


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_hybrid_with_one_part_is_its_pipeline(schedule: str) -> None:
    given = setting(4, 32, model=VGG16, micro_batch=4)
    hybrid, plain = (strategy(item, given) for item in (Pipeline(schedule=schedule, dp=2, tp=1, pp=2),
                                                      Pipeline(schedule=schedule, dp=2)))  # fmt: skip
    assert (hybrid.step_s, hybrid.memory) == (plain.step_s, plain.memory)


def test_a_hybrid_with_one_stage_is_tensor_parallelism() -> None:
    """Both have equal parts and equal messages of layers."""
    given = setting(4, 32, micro_batch=4)
    hybrid, tensor = (
        strategy(Pipeline(schedule="gpipe", dp=2, tp=2, pp=1), given),
        strategy(TensorParallel(dp=2), given),
    )
    assert hybrid.compute_s == pytest.approx(tensor.compute_s)
    assert hybrid.memory.weights == tensor.memory.weights
    layers = [[item.bytes_ for item in result.messages if "layers" in item.what] for result in (hybrid, tensor)]
    assert layers[0] == layers[1]
