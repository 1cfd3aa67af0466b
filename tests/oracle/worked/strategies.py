"""Worked examples of strategies, by the first cell of their row in docs/oracle.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddlbench.counts.counts import Exchange, Rows
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.spatial.layers import Window
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from ddlbench.oracle.machine import collectives as by
from ddlbench.oracle.machine.collectives import path
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.setting import Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import Sharded, buckets, queue, sharded_step
from ddlbench.oracle.strategies.model_parallel import traffics
from ddlbench.oracle.timing import schedule
from ddlbench.texts import MIB
from tests.oracle.made import GPT, MACHINE, block, made, setting
from tests.oracle.worked.computing import EIGHT, GB, A, B, M, ms, s, us

LARGE = 10**9  # numbers: 4 GB
WEIGHTY = replace(A, tensor_sizes=(LARGE,))
RESNET, SMALL = ResNet("resnet50", [3, 4, 6, 3]), GPT2("gpt2_small", n_layer=12, n_embd=768, n_head=12)
IMAGES = VGG("vgg16", channels=[8] * 5, hidden=32, dropout=0.0, image_size=64, num_classes=10)  # counts are made up
CHANNELS = TensorParallel(tp=1, convolutions="channels")
TENSOR, PIPE = TensorParallel(tp=1), Pipeline(schedule="gpipe", pp=1)


def sent(outcome: Outcome, word: str) -> float:
    """Seconds of one kind of message."""
    return next(message.seconds for message in outcome.messages if word in message.what)


def volume(outcome: Outcome, word: str) -> float:
    return next(message.bytes_ for message in outcome.messages if word in message.what)


def data_parallel() -> list[str]:
    orders = [WEIGHTY, B], [A, replace(B, tensor_sizes=(LARGE,))]
    late, early = (strategy(DDP(), made(4, blocks, 8)) for blocks in orders)
    return [s(late.compute_s), s(late.exposed_s), s(early.hidden_s)]


def in_buckets() -> list[str]:
    sizes = [size * MIB for size in (1, 6, 20, 0.75, 0.5)]
    return [", ".join(f"{bucket.size / MIB:g}" for bucket in buckets([sizes], [0.0])) + " MiB"]


def horovod() -> list[str]:
    result = buckets([[2], [1], [2]], [1, 1, 1], 3, 3)
    return [*(f"{item.size:g} bytes at {item.ready:g} s" for item in result), s(queue(result, float))]


def zero() -> list[str]:
    result = [strategy(DeepSpeedOptions(zero_stage=stage), made(4, [WEIGHTY, B], 8)) for stage in (0, 1)]
    two = strategy(DeepSpeedOptions(zero_stage=2), made(4, [WEIGHTY, B], 8, micro_batch=1))
    return [s(sent(result[0], "gradients")), s(sent(result[1], "weights")), s(sent(two, "gradients"))]


def zero3() -> list[str]:
    outcome = strategy(DeepSpeedOptions(zero_stage=3), made(4, [block(name, 1, 2, 4 * 10**8) for name in "abc"], 8))
    return [f"{volume(outcome, 'gathering') / GB:.3g} GB"]


def hsdp() -> list[str]:
    outcome = strategy(FSDP(replicate=2), made(8, [WEIGHTY, B], 8))
    return [f"{volume(outcome, 'shards') / GB:.3g} GB", s(sent(outcome, "all-reduce of shards"))]


def layer(leaving: float = 2e6, by_channels: bool = False) -> tuple[float, float]:
    """Seconds forward and backward of a convolution of 1 MB in, with its norm; 4 ranks."""
    shares = (Exchange("filter", 1e6, leaving), Exchange("norm", leaving, leaving))
    if by_channels:
        shares = (Exchange("channel", 1e6, leaving),)
    given = made(4, [replace(A, exchanges=shares), B], 1)
    first, _ = traffics(given, 1, 4, [0, 0])
    return first.forward, first.backward


def tensor() -> list[str]:
    plain, sequence = (strategy(TensorParallel(sequence_parallel=item), setting(2)) for item in (False, True))
    loss = 4 * 8 * 8 * 4
    return [f"{(volume(item, 'layers') - loss) / 1024:g} KiB" for item in (plain, sequence)]


def megatron() -> list[str]:
    return [f"{volume(strategy(Megatron(), setting(2)), 'layers') / 1024:g} KiB"]


def spatial() -> list[str]:
    blocks = [replace(A, rows=(Rows("conv", Window(64, 3, 1, 1), 3 * 64 * 4),)), B]
    given = made(2, blocks, 8, model=IMAGES)
    outcome = strategy(Spatial(sp=2), given)
    return [s(outcome.compute_s), f"{volume(outcome, 'halo') / 1024:g} KiB", us(sent(outcome, "halo"))]


def of_schedule(outcome: Outcome) -> list[str]:
    return [s(outcome.compute_s), s(outcome.bubble_s)]


def piped(framework: Pipeline | PipeDream, output: float = 0.0) -> Outcome:
    """Two stages of 1 + 2 s a sample, four micro batches of 2 samples."""
    return strategy(framework, made(2, [block("a", 1, 2, output=output), block("b", 1, 2)], 8, micro_batch=2))


def equal(stages: int, send: float = 0.0) -> schedule.Stages:
    return schedule.Stages((1.0,) * stages, (2.0,) * stages, (send,) * (stages - 1) + (0.0,))


def on_shared_cores() -> list[str]:
    passes = schedule.simulate("gpipe", equal(2), 2, 2, lambda ranks: 1.5 if ranks > 1 else 1.0)
    return [s(passes[-1].end), s(sum(item.end - item.begin for item in passes if item.stage == 0))]


def split_weights() -> Setting:
    """4 GB in the first of two blocks, all of it split by tensor parallelism."""
    return made(8, [replace(A, tensor_sizes=(LARGE,), split_parameters=LARGE), B], 8, micro_batch=1)


def hybrid() -> list[str]:
    tensor = strategy(TensorParallel(dp=2, tp=4), split_weights())
    piped = strategy(Pipeline(schedule="1f1b", dp=2, tp=2, pp=2, balance=[1, 1]), split_weights())
    return [s(sent(tensor, "gradients")), s(sent(piped, "gradients"))]


def data_and_spatial() -> list[str]:
    blocks = [replace(A, tensor_sizes=(LARGE,), rows=(Rows("conv", Window(64), 1.0),)), B]
    return [s(sent(strategy(Spatial(dp=4, sp=2), made(8, blocks, 8, model=IMAGES)), "gradients"))]


def limit_of(framework: object, model: Model, degree: str) -> str:
    result = strategy(framework, setting(1, model=model)).limits
    return str(next(limit.largest for limit in result if limit.degree == degree))


STRATEGIES: dict[str, Callable[[], list[str]]] = {
    "serial": lambda: [s(strategy(Single(), made(1, [A, B], 8)).step_s)],
    "checkpointed blocks": lambda: [s(strategy(DDP(), made(1, [A, B], 8, checkpoint_activations=True)).step_s)],
    "data parallel": data_parallel,
    "buckets": in_buckets,
    "Horovod": horovod,
    "local SGD": lambda: [ms(strategy(LocalSGD(local_steps=8), made(4, [WEIGHTY, B], 8)).exposed_s)],
    "ZeRO 0, 1, 2": zero,
    "ZeRO 3": zero3,
    "FSDP": lambda: [s(sharded_step([Sharded(4, 8, 1, 1, 1), Sharded(4, 8, 1, 0, 1)]))],
    "HSDP": hsdp,
    "tensor": tensor,
    "Megatron": megatron,
    "filter": lambda: [us(item) for item in layer()],
    "channel": lambda: [us(item) for item in layer(by_channels=True)],
    "spatial": spatial,
    "spatial layer": lambda: [spatial()[2]],
    "GPipe, 1F1B": lambda: of_schedule(piped(Pipeline(schedule="gpipe", balance=[1, 1]))),
    "interleaved": lambda: [s(schedule.seconds("interleaved", equal(8), 4, 8))],
    "zero bubble": lambda: [s(schedule.seconds("zero_bubble", equal(4), 4, 8))],
    "breadth-first, ZBV, DualPipeV": lambda: [
        s(schedule.seconds(name, equal(8), 4, 16)) for name in ("looped_bfs", "zbv", "dualpipev")
    ],
    "PipeDream": lambda: [s(piped(PipeDream(balance=[1, 1]), output).step_s) for output in (0.0, 20e9)],
    "sending between stages": lambda: [s(schedule.seconds("gpipe", equal(4, 0.5), 4, 1))],
    "stages on shared cores": on_shared_cores,
    "data + tensor, 3-D hybrid": hybrid,
    "data + spatial": data_and_spatial,
    "dp": lambda: [limit_of(Single(), GPT, "dp")],
    "tp": lambda: [limit_of(TENSOR, SMALL, "tp"), *(limit_of(item, RESNET, "tp") for item in (TENSOR, CHANNELS))],
    "sp": lambda: [limit_of(Spatial(sp=1), RESNET, "sp")],
    "pp": lambda: [limit_of(PIPE, RESNET, "pp"), limit_of(PIPE, SMALL, "pp")],
    "data": lambda: [s(by.ring_all_reduce(M, EIGHT)), s(EIGHT.seconds("all_reduce", M))],
    "pipeline, computing": lambda: [s(piped(Pipeline(schedule="gpipe", balance=[1, 1])).step_s)],
    "pipeline, sending": lambda: [s(schedule.seconds("gpipe", equal(4, 0.5), 4, 1) - 12)],
    "filter layer": lambda: [us(sum(layer(leaving=1e6)))],
    "data + filter": lambda: [hybrid()[0], s(path(replace(MACHINE, devices_per_node=1), 2).seconds("all_reduce", GB))],
    "spatial limit": lambda: [limit_of(Spatial(sp=1), RESNET, "sp")],
}
