"""The inputs and the outcome of the prediction of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

from ddlbench.counts.counts import Counts
from ddlbench.job import Job
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.offloading import plan_of
from ddlbench.oracle.machine import collectives
from ddlbench.oracle.machine.collectives import Path
from ddlbench.oracle.machine.machine import Machine
from ddlbench.oracle.timing.computation import Computation, Pass
from ddlbench.recomputation import Plan

BYTES = {"fp32": FP32_BYTES, "bf16": 2, "fp16": 2}  # of one number


@dataclass(frozen=True)
class Setting:
    """One job on one machine, and the seconds of computing of its model there."""

    job: Job
    machine: Machine
    computation: Computation

    @property
    def counts(self) -> Counts:
        return self.computation.counts

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.machine.per_node(self.job.world_size)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one number of a gradient that is sent."""
        return BYTES[self.job.reduce_dtype]

    def micro_batch(self, replicas: int) -> tuple[int, float]:
        """The number of micro batches of a step, and the samples of one micro batch."""
        count = self.job.micro_batches(replicas)
        return count, self.job.replica_batch(replicas) / count

    def plan(self, samples: float, first: int = 0, end: int | None = None, in_flight: int = 1) -> Plan:
        """Which blocks of a micro batch run again or are offloaded, among the blocks of a rank: from `first` to `end`.
        in_flight: as for `plan_of`"""
        job, blocks = self.job, self.counts.blocks[first:end]
        choices = job.checkpoint_activations, job.offload_activations, job.flops_per_host_byte
        names = [block.name for block in blocks]
        return plan_of(*choices, names, lambda: [block.link(samples) for block in blocks], in_flight)

    def passes(self, samples: float, tp: int = 1) -> list[Pass]:
        """Seconds of each block for a micro batch on one device alone (`Computation.blocks`), with what runs again."""
        return self.computation.blocks(samples, tp, self.plan(samples))

    @property
    def contention(self) -> float:
        """Factor by which the slowest rank computes slower than one rank alone."""
        return self.machine.shared_cores(self.per_node) * self.machine.slowest(self.job.world_size)

    def compute_s(self, passes: Iterable[Pass], count: int, parameters: float) -> float:
        """Seconds in which the slowest rank computes in a step: `count` micro batches and the update of its
        parameters."""
        seconds = count * sum(block.forward + block.backward for block in passes)
        return (seconds + self.computation.update(parameters)) * self.contention

    def exposed(self, seconds: float, late: float) -> float:
        """Seconds by which communication delays the step: `late`, the seconds after the end of computing, and a share
        of the other seconds, because hidden communication slows computing on this machine."""
        return late + (seconds - late) * self.machine.hidden_cost_with(self.per_node)

    def packing_s(self, bytes_: float) -> float:
        """Seconds in which a device copies gradients into messages and back; 0 if its bandwidth is not known."""
        rate = self.machine.device.bytes_per_s
        return self.machine.packing * bytes_ / rate if rate else 0.0

    def path(self, ranks: int, stride: int = 1) -> Path:
        """The connection of a group of ranks (`collectives.path`)."""
        return collectives.path(self.machine, ranks, stride, self.job.world_size)


@dataclass(frozen=True)
class Message:
    """Communication of one kind in a step: the number of messages, their total bytes and seconds, and the seconds by
    which they delay the step.

    along: dp | tp | pp | sp; dp also for all collectives of shared images, because gradients are summed over all ranks;
        ends: first and last stage; host: no other rank; "": not known
    largest: bytes of the largest message, 0 if all are equal
    """

    what: str
    along: str
    count: float
    bytes_: float
    seconds: float
    exposed: float
    largest: float = 0.0

    @property
    def hidden(self) -> float:
        """The other seconds. Learned costs of hidden communication can be so high that none are gained."""
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of the rank that needs the most memory. activations: with temporary results; buffers: all other bytes,
    of the model and of libraries"""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Limit:
    """The largest degree of a strategy. layer: what sets this limit, as text"""

    degree: str  # dp | tp | pp | sp
    largest: int
    layer: str


@dataclass(frozen=True)
class Outcome:
    """A predicted step.

    compute_s: seconds in which the slowest rank computes
    peak: computes the memory; called only if `memory` is read
    bubble_s: seconds in which this rank waits for other stages
    traced: whether a rehearsal counted its messages and memory
    micro_batches: of a step, in a pipeline; micro_samples: samples of a micro batch
    """

    compute_s: float
    messages: tuple[Message, ...]
    peak: Callable[[], Memory]
    limits: tuple[Limit, ...] = ()
    bubble_s: float = 0.0
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    traced: bool = False
    micro_batches: int = 1
    micro_samples: float = 0.0

    @cached_property
    def memory(self) -> Memory:
        return self.peak()

    @property
    def exposed_s(self) -> float:
        return sum(message.exposed for message in self.messages)

    @property
    def hidden_s(self) -> float:
        return sum(message.hidden for message in self.messages)

    @property
    def step_s(self) -> float:
        """Seconds of a step without waiting for data."""
        return self.compute_s + self.exposed_s + self.bubble_s
