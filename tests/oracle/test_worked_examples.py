"""Each worked example of docs/oracle.md has the numbers that the equations give."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ddlbench.config.compose import configuration
from ddlbench.counts.counts import Block, Counts, Exchange, Line, Rows, Work
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
from ddlbench.oracle.machine import collectives as by
from ddlbench.oracle.machine.collectives import path
from ddlbench.oracle.machine.machine import Sweep
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.predictor import Prediction, strategy
from ddlbench.oracle.setting import Outcome, Setting
from ddlbench.oracle.strategies.data_parallel import Sharded, buckets, queue, sharded_step
from ddlbench.oracle.strategies.model_parallel import traffics
from ddlbench.oracle.timing import schedule
from ddlbench.oracle.timing.computation import Computation, Pass, Speeds
from ddlbench.recipe.optimizers import optimizers
from ddlbench.report.predicted import with_error
from ddlbench.texts import MIB
from tests.oracle.made import ABCI, GPT, MACHINE, VGG16, block, by_one_step, equal, made, setting

GB, M = 1e9, 8e9  # bytes
FOUR, EIGHT = path(MACHINE, 4), path(MACHINE, 8)
A, B = block("a", 1, 2), block("b", 3, 4)


def s(seconds: float) -> str:
    return f"{seconds:.3g} s"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


def with_work(
    flops: Sequence[float], fixed: Sequence[float], per_sample: Sequence[float], shared: Sequence[bool]
) -> Block:
    work = Work(np.array(flops), Line(np.array(fixed), np.array(per_sample)), np.array(shared))
    return replace(block("made", 0, 0), forward=work)


TWO = with_work([100, 10], [20, 0], [40, 30], [False, False])  # operations


def computing(*blocks: Block, speeds: Speeds = Speeds(1.0, float("inf"))) -> Computation:  # noqa: B008
    return Computation(Counts(blocks, 0), speeds, optimizers["sgd"].costs, "given")


def roofline() -> list[str]:
    operations = [with_work([100], [20], [40], [False]), with_work([10], [0], [30], [False]), TWO]
    return [s(Speeds(10, 10).block(one, 2).forward) for one in operations]


def kernels() -> list[str]:
    return [s(Speeds(10, 10, kernel_s=1, host_s=pace).block(TWO, 2).forward) for pace in (0, 20)]


def host_queue() -> list[str]:
    """A block of one long kernel and one of four short ones, forward only, on a host that needs 3 s for each."""
    blocks = with_work([10], [0], [0], [False]), with_work([1] * 4, [0] * 4, [0] * 4, [False] * 4)
    blocks = tuple(replace(one, backward=with_work([], [], [], []).forward) for one in blocks)
    passes = computing(*blocks, speeds=Speeds(1, float("inf"), host_s=3)).blocks(1)
    return [s(one.forward) for one in passes] + [s(sum(one.forward for one in passes))]


def slowest_rank() -> list[str]:
    machine = replace(MACHINE, spread=0.02)
    return [f"{machine.slowest(ranks):.3f} times" for ranks in (8, 1024)]


def one_measured_step() -> list[str]:
    result = computing(A, B).scaled_to(160, 8, 1, "one GPU's step")
    return [s(result.step(8)), s(computing(A, B).step(8)), s(result.step(2))]


def one_step_beside_a_host() -> list[str]:
    """One kernel of 1 s a sample forward and one backward."""
    plain = computing(block("a", 1, 1), speeds=Speeds(1, float("inf"), kernel_s=1, host_s=4))
    result = plain.scaled_to(34, 8, 1, "one GPU's step")
    waited = plain.scaled_to(10, 1, 1, "one GPU's step")
    fast = plain.scaled_to(6, 1, 1, "one GPU's step")
    slow = plain.scaled_to(68, 8, 1, "one GPU's step")
    return [
        *(s(plain.step(8)), *(s(result.step(size)) for size in (8, 2, 1))),
        *(s(waited.step(1)), f"h = {s(waited.speeds.host_s)}", s(waited.step(8))),
        *(s(fast.step(1)), f"h = {s(fast.speeds.host_s)}"),
        *(s(slow.step(8)), s(slow.step(1))),
    ]


def calibrated() -> list[str]:
    result = replace(computing(block("a", 1, 2)), measured={4: [Pass(5, 9)]})
    return [s(result.blocks(8)[0].forward), s(result.blocks(8)[0].backward)]


def shared_cores() -> list[str]:
    measured = replace(MACHINE, cores=2, contention={2: 1.2, 4: 3.0})
    plain = replace(MACHINE, cores=2)
    return [f"{plain.shared_cores(4):g} times", *(f"{measured.shared_cores(ranks):.3g} times" for ranks in (3, 8))]


@cache
def loaded() -> Prediction:
    """A step of 1 s with 8 samples, on four GPUs whose ranks load 4 samples a second; 320 samples an epoch."""
    words = ("+framework=ddp", "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=16")
    config = configuration(*words, "model.image_size=64", "train.batch_per_gpu=8")
    abci = replace(ABCI, spread=0.0)
    return by_one_step(config, 4, abci, OneStep(1.0), samples=320, loader=4.0)


def error() -> list[str]:
    predicted = {"predicted_step_s": 0.30, "predicted_low_s": None, "predicted_high_s": None}
    row = {"data_wait_share": None, "profile_step_time_s": None, "global_batch": 32, "sample_time_s": 0.32 / 32}
    return [f"{100 * with_error(row, predicted)['predicted_error']:.3g} %"]


LARGE = 10**9  # numbers: 4 GB
WEIGHTY = replace(A, tensor_sizes=(LARGE,))
RESNET, SMALL = ResNet("resnet50", [3, 4, 6, 3]), GPT2("gpt2_small", n_layer=12, n_embd=768, n_head=12)
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
    first, _ = traffics(given, 1, 4, [(0, 1)])
    return first.forward, first.backward


def tensor() -> list[str]:
    plain, sequence = (strategy(TensorParallel(sequence_parallel=item), setting(2)) for item in (False, True))
    loss = 4 * 8 * 8 * 4
    return [f"{(volume(item, 'layers') - loss) / 1024:g} KiB" for item in (plain, sequence)]


def megatron() -> list[str]:
    return [f"{volume(strategy(Megatron(), setting(2)), 'layers') / 1024:g} KiB"]


def spatial() -> list[str]:
    blocks = [replace(A, rows=(Rows("conv", Window(64, 3, 1, 1), 3 * 64 * 4),)), B]
    given = made(2, blocks, 8, model=VGG16)
    outcome = strategy(Spatial(sp=2), given)
    return [s(outcome.compute_s), f"{volume(outcome, 'halo') / 1024:g} KiB", us(sent(outcome, "halo"))]


def of_schedule(outcome: Outcome) -> list[str]:
    return [s(outcome.compute_s), s(outcome.bubble_s)]


def piped(framework: Pipeline | PipeDream, output: float = 0.0) -> Outcome:
    """Two stages of 1 + 2 s a sample, four micro batches of 2 samples."""
    return strategy(framework, made(2, [block("a", 1, 2, output=output), block("b", 1, 2)], 8, micro_batch=2))


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
    return [s(sent(strategy(Spatial(dp=4, sp=2), made(8, blocks, 8, model=VGG16)), "gradients"))]


def limit_of(framework: object, model: Model, degree: str) -> str:
    result = strategy(framework, setting(1, model=model)).limits
    return str(next(limit.largest for limit in result if limit.degree == degree))


# By the first cell of their row.
EXAMPLES: dict[str, Callable[[], list[str]]] = {
    "ring all-reduce": lambda: [s(by.ring_all_reduce(M, EIGHT))],
    "tree all-reduce": lambda: [s(by.tree_all_reduce(M, EIGHT))],
    "hierarchical all-reduce": lambda: [s(by.hierarchical_all_reduce(M, EIGHT))],
    "all-reduce": lambda: [s(EIGHT.seconds("all_reduce", M))],
    "all-gather, reduce-scatter": lambda: [s(EIGHT.seconds("all_gather", M)), s(FOUR.seconds("reduce_scatter", M))],
    "broadcast": lambda: [s(EIGHT.seconds("broadcast", M))],
    "point to point": lambda: [s(by.send(M, MACHINE, 8, 0)), s(by.send(M, MACHINE, 8, 4))],
    "concurrent groups": lambda: [s(path(MACHINE, 2, stride=4, world=8).seconds("all_reduce", GB))],
    "measured collective": lambda: [s(Sweep((1e9, 2e9), (1.0, 3.0)).at(size)) for size in (1.5e9, 3e9)],
    "roofline": roofline,
    "kernels": kernels,
    "queue": host_queue,
    "slowest rank": slowest_rank,
    "update": lambda: [ms(computing(A, speeds=Speeds(1.0, 900e9)).update(1e9))],
    "one measured step": one_measured_step,
    "one measured step of a GPU": one_step_beside_a_host,
    "measured blocks": calibrated,
    "split layers": lambda: [s(computing(with_work([4, 4], [0, 0], [0, 0], [True, False])).blocks(1, tp=4)[0].forward)],
    "shared cores": shared_cores,
    "packing": lambda: [ms(made(4, [A, B], 8, replace(MACHINE, packing=4.0)).packing_s(4 * GB))],
    "hidden communication": lambda: [s(made(4, [A, B], 8, replace(MACHINE, hidden_cost={4: 0.5})).exposed(0.6, 0.1))],
    "waiting for data": lambda: [s(loaded().data_s or 0), s(loaded().step_s or 0)],
    "epoch": lambda: [s(loaded().epoch_s or 0), f"{loaded().samples_per_s:.3g} samples/s"],
    "error": error,
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
    "data": lambda: [s(by.ring_all_reduce(M, EIGHT))],
    "pipeline, computing": lambda: [s(piped(Pipeline(schedule="gpipe", balance=[1, 1])).step_s)],
    "pipeline, sending": lambda: [s(schedule.seconds("gpipe", equal(4, 0.5), 4, 1) - 12)],
    "filter layer": lambda: [us(sum(layer(leaving=1e6)))],
    "data + filter": lambda: [hybrid()[0], s(path(replace(MACHINE, devices_per_node=1), 2).seconds("all_reduce", GB))],
    "spatial limit": lambda: [limit_of(Spatial(sp=1), RESNET, "sp")],
}
PAGE = Path(__file__).parents[2] / "docs" / "oracle.md"
WHOLE_MODELS = ("tp", "sp", "pp", "spatial limit")  # models of full size are counted: 30 s
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in WHOLE_MODELS else name for name in EXAMPLES]


def rows() -> dict[str, str]:
    """The last cell of each row of the tables that have examples, by the first."""
    result: dict[str, str] = {}
    header = None
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif header[-1] == "example" and not set(line) <= set("|- "):
            assert cells[0] not in result
            result[cells[0]] = cells[-1]
    return result


def test_every_equation_has_an_example() -> None:
    assert sorted(rows()) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_the_page_are_those_of_the_code(name: str) -> None:
    text, place = rows()[name], 0
    for number in EXAMPLES[name]():  # in the order of the text
        found = re.compile(rf"(?<![\d.]){re.escape(number)}(?!\d)").search(text, place)
        assert found, number
        place = found.end()
