"""What benchmarks/oracle.py predicts from: runs of one process, processes beside each other, and collectives alone.

step       of each framework with one process (the kind of the test runs, too, with 2 and 4 processes)
blocks     forward and backward seconds of each block, one process: how a step is spread over the blocks
beside     one process's step on 1, 2 and 4 processes that send nothing: how they slow each other on shared cores
collectives seconds of each collective between 2 and between 4 processes, by size; and how much longer computing takes
            beside one, as a share of what that takes alone

Nothing is taken from a run in which a framework communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from benchmarks import steps
from benchmarks.worlds import World
from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores
from ddlbench.oracle.machine.machine import Machine, Sweep, load
from ddlbench.oracle.measured.inputs import OneStep, from_one_step, proportions
from ddlbench.oracle.measured.network import COLLECTIVES
from ddlbench.oracle.predictor import Inputs
from ddlbench.oracle.timing.computation import Computation, Pass

MODELS = {
    "resnet50": ("model.layers=[1,1,1,1]", "model.width_per_group=32", "model.image_size=64", "model.num_classes=10"),
    "vgg16": ("model.channels=[16,32,64,128,128]", "model.hidden=256", "model.image_size=64", "model.num_classes=10"),
    "gpt2_small": (
        "model.n_layer=4",
        "model.n_embd=256",
        "model.n_head=4",
        "model.vocab_size=2048",
        "model.seq_len=64",
    ),
}
# Words of each number of processes, where a framework has more than its default.
FRAMEWORKS: dict[str, dict[int, tuple[str, ...]]] = {
    **{name: {} for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "gpipe", "1f1b")},
    "hybrid": {4: ("framework.tp=2", "framework.pp=2"), 2: ("framework.pp=2",)},
}
COUNTS = (2, 4)
SAMPLES, MICRO = 8, 4  # of one process; the same micro batch everywhere, so that its size is no part of the question
COMMON = (
    "loader=synthetic",
    f"train.batch_per_gpu={SAMPLES}",
    f"train.micro_batch={MICRO}",
    "recipe.optimizer.lr=3e-5",
)
SIZES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)  # bytes of the whole message


@dataclass(frozen=True)
class Measurement:
    """kind: see above; model, framework: "" where it has none."""

    kind: str
    model: str
    framework: str
    ranks: int

    @property
    def times(self) -> int:
        """How often it is measured in each repeat: every row of a model depends on its processes beside each other."""
        return 3 if self.kind == "beside" else 1

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.model, self.framework, f"{self.ranks} processes")))


def words(of: Measurement) -> tuple[str, ...]:
    """Its configuration."""
    degrees = FRAMEWORKS.get(of.framework, {}).get(of.ranks, ())
    return (f"+framework={of.framework or 'single'}", f"+model={of.model}", *MODELS[of.model], *COMMON, *degrees)


def needed(models: Sequence[str], frameworks: Sequence[str]) -> list[Measurement]:
    """What predictions of these frameworks need."""
    return [
        *(Measurement("step", model, name, 1) for model in models for name in frameworks),
        *(Measurement("beside", model, "", ranks) for model in models for ranks in (1, *COUNTS)),
        *(Measurement("blocks", model, "", 1) for model in models),
        *(Measurement("collectives", "", "", ranks) for ranks in COUNTS),
    ]


def measure(of: Measurement, world: World, window_s: float) -> list[float]:
    """One repeat, as a list of numbers. Of blocks: forward, backward, ..., update. Of collectives: by kind and size,
    then the cost of a hidden one."""
    if of.kind == "collectives":
        of_rank_0 = world.run(steps.collectives, SIZES)[0]
        return [seconds for kind in (*COLLECTIVES, "hidden_cost") for seconds in of_rank_0[kind]]
    config = configuration(*words(of))
    if of.kind == "blocks":
        passes, update_s = world.run(steps.blocks, config, MICRO)[0]
        return [*chain.from_iterable(passes), update_s]
    return world.run(steps.seconds_beside_others, config, window_s)[0]


@dataclass
class Calibration:
    """measured: the repeats of each measurement."""

    measured: dict[Measurement, list[list[float]]]

    def covers(self, case: Measurement) -> bool:
        return all(self.measured.get(of) for of in needed([case.model], [case.framework]))

    def of(self, case: Measurement) -> Inputs:
        """What is known when that case is predicted."""
        machine = self.machine(case.model)

        def computation(config: Config) -> Computation:
            step = OneStep(self._median(Measurement("step", case.model, case.framework, 1)), SAMPLES, MICRO)
            blocks = self._blocks(config, machine)
            return from_one_step(config, machine, step, f"{case.framework} in one process", blocks)

        return Inputs(machine, computation)

    def machine(self, model: str) -> Machine:
        """This machine's cores and links, and how processes that train this model slow each other."""
        alone = self._median(Measurement("beside", model, "", 1))
        slower = {ranks: self._median(Measurement("beside", model, "", ranks)) / alone for ranks in COUNTS}
        sweeps = {(kind, ranks): sweep for ranks in COUNTS for kind, sweep in self._sweeps(ranks).items()}
        cost = {ranks: self._medians(Measurement("collectives", "", "", ranks))[-1] for ranks in COUNTS}
        return replace(load("local"), cores=len(allowed_cores()), contention=slower, sweeps=sweeps, hidden_cost=cost)

    def _median(self, of: Measurement) -> float:
        return median(seconds for repeat in self.measured[of] for seconds in repeat)

    def _medians(self, of: Measurement) -> list[float]:
        """The median over the repeats of each number that a measurement has."""
        return [median(numbers) for numbers in zip(*self.measured[of], strict=True)]

    def _blocks(self, config: Config, machine: Machine) -> Computation:
        *passes, update_s = self._medians(Measurement("blocks", config.model.name, "", 1))
        plain = proportions(config, machine)
        measured = {MICRO: tuple(map(Pass, passes[::2], passes[1::2]))}
        return replace(plain, measured=measured, update_s=update_s / plain.counts.parameter_count)

    def _sweeps(self, ranks: int) -> dict[str, Sweep]:
        numbers = self._medians(Measurement("collectives", "", "", ranks))
        sizes = tuple(map(float, SIZES))
        return {kind: Sweep(sizes, tuple(numbers[at * len(sizes) : (at + 1) * len(sizes)]))
                for at, kind in enumerate(COLLECTIVES)}  # fmt: skip
