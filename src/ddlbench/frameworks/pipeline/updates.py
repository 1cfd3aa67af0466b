"""The updates of a pipeline that stays full: of which weights a minibatch's gradient is, and when it is applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.staleness import Staleness
from ddlbench.frameworks.pipeline.versions import Version, Weights
from ddlbench.frameworks.shared.gradients import gradient
from ddlbench.frameworks.shared.groups import subgroup
from ddlbench.frameworks.shared.step import Update
from ddlbench.job import Job
from ddlbench.measure.profiling.spans import COMMUNICATE, span


@dataclass(eq=False)
class Minibatch:
    """What one update is made of."""

    index: int  # since the pipeline was empty
    rate: float
    weights: Version
    made: int  # updates of this stage when it was admitted
    backwards: int = 0  # micro batches of which this stage has the gradient
    sums: Sequence[dist.Work] | None = None  # of tied weights' gradients; None: not started


class Updates:
    """Gives each minibatch the weights that it may see, and makes an update of its gradient.

    wait: make an update only when the minibatch after the next is admitted, so that all stages admit each minibatch
    with the same weights; shared: names of weights of which the other end of the pipeline has a copy; clock: updates
    are made within the schedule, and are computing.
    """

    def __init__(
        self, job: Job, groups: Groups, model: nn.Sequential, wait: bool, shared: Sequence[str], clock: BusyClock
    ) -> None:
        self.groups, self.wait, self.shared = groups, wait, shared
        self.make = clock.computing(self._make)
        self.staleness = Staleness(groups.stage_rank, groups.layout.pp)
        self.weights = Weights(model)
        self.use = self.weights.use
        self.optimizer = job.optimizer(self.weights.newest.items())
        self.update = Update(self.optimizer, job)
        # The tied weights' group is their own: both ends send in it between other messages, in another order.
        pairs = groups.layout.embedding_groups()
        self.embedding_group = subgroup(pairs, job, own=True) if groups.layout.pp > 1 else None
        self.due: deque[Minibatch] = deque()  # gradients complete, update not made
        self.admitted = 0

    def admit(self, in_flight: bool) -> Minibatch:
        """The next minibatch, with the newest weights that it may see and the learning rate of its update.

        in_flight: minibatches admitted before still need the weights that they were admitted with
        """
        while self.due and self.due[0].index < self.admitted - 1:
            self._apply(self.due.popleft(), in_flight)
        self.admitted += 1
        rate = self.optimizer.param_groups[0]["lr"]
        return Minibatch(self.admitted - 1, rate, self.weights.version(), self.update.count)

    def take(self, minibatch: Minibatch, in_flight: bool) -> None:
        """The gradient of this minibatch is complete on this stage. in_flight: as in `admit`."""
        with span(COMMUNICATE):  # averages over copies of the stage
            self.groups.reduce([gradient(weight) for weight in minibatch.weights.values()], ())
        if self.wait:
            self.due.append(minibatch)
        else:
            self._apply(minibatch, in_flight)

    def start_sums(self, before: int) -> None:
        """Start to sum tied weights' gradients over both ends, for each minibatch below this index that has its own.

        The first stage has them p - 1 turns into the next minibatch, the last stage at the end of its own. Both start
        in the next one, after the exchange of a turn: then the sum ends without any later work of this rank's host
        (docs/adr/0014), and both stages, which are p - 1 turns apart, come to it at the same time.
        """
        for minibatch in self.due:
            if minibatch.sums is None and minibatch.index < before:
                with span(COMMUNICATE):
                    shares = [gradient(minibatch.weights[name]) for name in self.shared]
                    minibatch.sums = [
                        dist.all_reduce(share, group=self.embedding_group, async_op=True) for share in shares
                    ]

    def _apply(self, minibatch: Minibatch, in_flight: bool) -> None:
        for work in minibatch.sums or ():
            work.wait()
        self.make(minibatch, in_flight)

    def _make(self, minibatch: Minibatch, in_flight: bool) -> None:
        self.staleness.count(self.update.count - minibatch.made)
        if in_flight:
            self.weights.copy_newest()
        self.weights.take_gradients(minibatch.weights)
        with at_rate(self.optimizer, minibatch.rate):
            self.update.apply(self.weights.newest.values())

    def finish(self) -> None:
        """Make the updates that are left: no minibatch is in flight any more."""
        self.start_sums(before=self.admitted)
        while self.due:
            self._apply(self.due.popleft(), in_flight=False)
        self.use(self.weights.newest)
        self.admitted = 0


@contextmanager
def at_rate(optimizer: Optimizer, rate: float) -> Generator[None]:
    """The optimizer steps at `rate`, whatever the loop has set for the minibatch that it is at."""
    rates = [group["lr"] for group in optimizer.param_groups]
    set_rates(optimizer, [rate] * len(rates))
    try:
        yield
    finally:
        set_rates(optimizer, rates)


def set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
