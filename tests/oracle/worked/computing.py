"""Worked examples of collectives and of computing, by the first cell of their row in docs/oracle.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from ddlbench.config.compose import configuration
from ddlbench.counts.counts import Block, Counts, Line, Work
from ddlbench.oracle.machine import collectives as by
from ddlbench.oracle.machine.collectives import path
from ddlbench.oracle.machine.machine import Sweep, load
from ddlbench.oracle.measured.inputs import OneStep, from_one_step
from ddlbench.oracle.predictor import Inputs, Prediction, predict
from ddlbench.oracle.timing.computation import Computation, Pass, Speeds
from ddlbench.recipe.optimizers import optimizers
from ddlbench.report.predicted import with_error
from tests.oracle.made import MACHINE, block, made

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


def queue() -> list[str]:
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
    return [s(computing(A, B).step(8)), s(result.step(8)), s(result.step(2))]


def one_step_beside_a_host() -> list[str]:
    """One kernel of 1 s a sample forward and one backward."""
    plain = computing(block("a", 1, 1), speeds=Speeds(1, float("inf"), kernel_s=1, host_s=4))
    result = plain.scaled_to(34, 8, 1, "one GPU's step")
    waited = plain.scaled_to(10, 1, 1, "one GPU's step")
    slow = plain.scaled_to(68, 8, 1, "one GPU's step")
    return [
        *(s(plain.step(8)), *(s(result.step(size)) for size in (8, 2, 1))),
        *(s(waited.step(1)), f"h = {s(waited.speeds.host_s)}", s(waited.step(8))),
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
    abci = replace(load("abci"), spread=0.0)
    inputs = Inputs(abci, lambda given: from_one_step(given, abci, OneStep(1.0)), samples=320, loader=4.0)
    return predict(config, 4, inputs)


def error() -> list[str]:
    predicted = {"predicted_step_s": 0.30, "predicted_low_s": None, "predicted_high_s": None}
    row = {"data_wait_share": None, "profile_step_time_s": None, "global_batch": 32, "sample_time_s": 0.32 / 32}
    return [f"{100 * with_error(row, predicted)['predicted_error']:.3g} %"]


COMPUTING: dict[str, Callable[[], list[str]]] = {
    "ring all-reduce": lambda: [s(by.ring_all_reduce(M, EIGHT))],
    "tree all-reduce": lambda: [s(by.tree_all_reduce(M, EIGHT))],
    "hierarchical all-reduce": lambda: [s(by.hierarchical_all_reduce(M, EIGHT))],
    "all-reduce": lambda: [s(EIGHT.seconds("all_reduce", M))],
    "all-gather, reduce-scatter": lambda: [s(EIGHT.seconds("all_gather", M)), s(FOUR.seconds("reduce_scatter", M))],
    "broadcast": lambda: [s(EIGHT.seconds("broadcast", M))],
    "point to point": lambda: [s(by.send(M, MACHINE, 1, 8)), s(by.send(M, MACHINE, 4, 8))],
    "concurrent groups": lambda: [s(path(MACHINE, 2, stride=4, world=8).seconds("all_reduce", GB))],
    "measured collective": lambda: [s(Sweep((1e9, 2e9), (1.0, 3.0)).at(size)) for size in (1.5e9, 3e9)],
    "roofline": roofline,
    "kernels": kernels,
    "queue": queue,
    "slowest rank": slowest_rank,
    "update": lambda: [ms(computing(A, speeds=Speeds(1.0, 900e9)).update(1e9))],
    "one measured step": one_measured_step,
    "one measured step of a GPU": one_step_beside_a_host,
    "measured blocks": calibrated,
    "split layers": lambda: [s(computing(with_work([4, 4], [0, 0], [0, 0], [True, False])).blocks(1, tp=4)[0].forward)],
    "shared cores": shared_cores,
    "hidden communication": lambda: [s(made(4, [A, B], 8, replace(MACHINE, hidden_cost={4: 0.5})).exposed(0.6, 0.1))],
    "waiting for data": lambda: [s(loaded().data_s or 0), s(loaded().step_s or 0)],
    "epoch": lambda: [s(loaded().epoch_s or 0), f"{loaded().samples_per_s:.3g} samples/s"],
    "error": error,
}
