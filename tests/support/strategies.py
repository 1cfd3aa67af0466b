"""Every framework as the equality tests train it, and the plain training that it must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.schedules import V_SHAPED
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework
from tests.support.libraries import why_no_horovod
from tests.support.reference import Case


@dataclass(frozen=True)
class Strategy:
    """replicas: how many the ranks form. micro_batch: samples of one forward where the case leaves it to the framework;
    None: the whole share of a replica. policy: it casts weights to bf16 where others use autocast."""

    name: str
    framework: Framework
    replicas: int
    micro_batch: int | None = None
    policy: bool = False


def strategies(world: int, case: Case) -> list[Strategy]:
    """On more than two ranks all of them without accumulation, and DDP in every case."""
    own = list(data_parallel(world))
    if world > 2 and not case.name.endswith("-whole"):
        return own
    own += [*served(world, case), *sharded(world, case), *pipelines(world, case)]
    return [*own, *tensor_parallel(world, case), *hybrids(world)]


def data_parallel(world: int) -> Iterator[Strategy]:
    if world == 1:
        yield Strategy("single", Single(), 1)
    yield Strategy("ddp", DDP(), world)
    if not why_no_horovod():
        yield Strategy("horovod", Horovod(), world)


def served(world: int, case: Case) -> Iterator[Strategy]:
    if case.clip_norm is None:
        yield Strategy("parameter_server", ParameterServer(), world)


def sharded(world: int, case: Case) -> Iterator[Strategy]:
    if world == 1:
        return
    policy = case.precision != "fp32" and case.model.name != "resnet"  # which has BatchNorm
    yield Strategy("fsdp", FSDP(), world, policy=policy)
    if policy:
        yield Strategy("fsdp-autocast", FSDP(mixed_precision="autocast"), world)
    if world == 2:
        yield Strategy("fsdp-offloaded", FSDP(offload_parameters=True), world, policy=policy)
    if world == 4:
        yield Strategy("fsdp-replicas", FSDP(replicate=2), world, policy=policy)
    if world in (2, 4):
        for stage in range(4):
            # A threshold of 0: these models are so small that stage 3 would share nothing out.
            yield Strategy(f"zero{stage}", DeepSpeed(zero_stage=stage, persistence_threshold=0), world)


def pipelines(world: int, case: Case) -> Iterator[Strategy]:
    """By itself a pipeline cuts 6 samples a rank into 3 micro batches a rank: 4 do not divide them."""
    if world == 1:
        return
    for schedule in ("gpipe", "1f1b"):
        yield Strategy(schedule, Pipeline(schedule=schedule), 1, micro_batch=2)
    if world == 2:
        for schedule in ("interleaved", "looped_bfs"):
            yield Strategy(schedule, Pipeline(schedule=schedule, virtual_stages=2), 1, micro_batch=2)
        yield Strategy("1f1b-by-seconds", Pipeline(schedule="1f1b", balance_by="seconds"), 1, micro_batch=2)
    if world == 4:
        yield Strategy("1f1b-replicas", Pipeline(schedule="1f1b", dp=2), 2, micro_batch=2)
    if not case.checkpoint_activations:
        yield Strategy("zero_bubble", Pipeline(schedule="zero_bubble"), 1, micro_batch=2)
        if world in (2, 4):  # of four ranks two pipelines: the models have five blocks or more
            for schedule in V_SHAPED:
                framework = Pipeline(schedule=schedule, virtual_stages=2, dp=world // 2)
                yield Strategy(schedule, framework, world // 2, micro_batch=2)


def hybrids(world: int) -> Iterator[Strategy]:
    """Where ranks share layers, a pipeline has fewer stages and so fewer and larger micro batches."""
    match world:
        case 2:
            yield Strategy("hybrid-tp", Pipeline(tp=2), 1, micro_batch=3)
            yield Strategy("hybrid-shards", Pipeline(dp=2, sharded=True), 2, micro_batch=2)
        case 4:
            yield Strategy("hybrid-tp-pp", Pipeline(schedule="1f1b", tp=2), 1, micro_batch=3)
            yield Strategy("hybrid-shards-pp", Pipeline(schedule="1f1b", dp=2, sharded=True), 2, micro_batch=2)
            yield Strategy("hybrid-shards-tp", Pipeline(dp=2, tp=2, sharded=True), 2, micro_batch=3)
        case _:
            pass


def tensor_parallel(world: int, case: Case) -> Iterator[Strategy]:
    if world not in (2, 4):  # 3 divides neither heads nor channels
        return
    yield Strategy("tensor", TensorParallel(), 1)
    if case.model.kind == "text":
        if case.precision == "fp32" and case.checkpoint_activations != "selective":  # refused
            yield Strategy("megatron", Megatron(), 1)
        yield Strategy("tensor-tokens", TensorParallel(dp=world // 2, tp=2, sequence_parallel=True), world // 2)
        return
    yield Strategy("channel", TensorParallel(convolutions="channels"), 1)
    if world == 4:
        yield Strategy("tensor-replicas", TensorParallel(dp=2, tp=2, parallel_loss=False), 2)
        yield Strategy("channel-replicas", TensorParallel(dp=2, tp=2, convolutions="channels"), 2)
    if case.model.name == "resnet":  # two rows at its end; VGG-16 has one
        yield Strategy("spatial", Spatial(dp=world // 2, sp=2), world // 2)
