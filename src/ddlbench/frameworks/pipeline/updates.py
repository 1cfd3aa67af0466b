"""The updates of a pipeline that stays full: which version of the weights a minibatch sees, when its gradient is
applied, and how old its weights are by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.shared.groups import gradient, subgroup
from ddlbench.frameworks.shared.step import Update
from ddlbench.job import Job
from ddlbench.loop import set_learning_rate
from ddlbench.measure.profiling.spans import COMMUNICATE, profiling, span
from ddlbench.ranks.control import AsyncReduction

Version = Mapping[str, nn.Parameter]  # name in the stage -> weight, whose gradient is this version's own


class Weights:
    """Weight stashing (Narayanan et al. 2019, section 3.3): the newest weights, which the optimizer updates, and older
    ones that batches in flight still need.

    Weights are copied when the optimizer would overwrite what a batch in flight needs, not before: with n batches in
    flight there are never more than n + 1 sets, the newest included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.newest: Version = dict(model.named_parameters())
        self.in_use = self.newest
        names = {id(parameter): name for name, parameter in self.newest.items()}
        # Where the module keeps each; a parameter tied within the stage has several places.
        self.places = [
            (module, attribute, names[id(parameter)])
            for module in model.modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def version(self) -> Version:
        """The newest weights as they are now; `copy_newest` protects them from later updates."""
        return {name: nn.Parameter(newest.data, newest.requires_grad) for name, newest in self.newest.items()}

    def use(self, version: Version) -> None:
        """The module computes with this version from now on: forward, and where it recomputes, backward."""
        if version is not self.in_use:
            for module, attribute, name in self.places:
                setattr(module, attribute, version[name])
            self.in_use = version

    def copy_newest(self) -> None:
        """Copy the newest weights to new memory, before an update that the versions in flight must not see."""
        for newest in self.newest.values():
            newest.data = newest.data.clone()

    def take_gradients(self, version: Version) -> None:
        """Make the gradient of this version that of the newest weights."""
        for name, newest in self.newest.items():
            newest.grad, version[name].grad = version[name].grad, None


class Staleness:
    """Updates between the weights of a gradient and the weights that it updates: the most on each stage."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages = stage, stages
        self.most: int | None = None  # on this rank's stage, None before its first update
        self.gathered: AsyncReduction | None = None

    def count(self, updates: int) -> None:
        """Count an update of this stage. updates: those made since the weights of its gradient"""
        self.most = max(updates, self.most or 0)

    def gather(self) -> None:
        """At the end of an epoch, on every rank: start to collect; no rank waits for another."""
        if self.most is None or profiling():
            return
        by_stage = torch.zeros(self.stages, dtype=torch.int64)
        by_stage[self.stage] = self.most
        self.gathered = AsyncReduction(by_stage, dist.ReduceOp.MAX)

    def by_stage(self) -> list[int] | None:
        """Over the epochs that have ended; None before the first. Waits until every rank has started to collect."""
        return self.gathered.result() if self.gathered else None


@dataclass(eq=False)
class Minibatch:
    """The samples of one update, on one stage.

    index: counted since the pipeline was empty
    rate: learning rate of its update
    weights: the version that all its passes on this stage see
    updates_when_admitted: number of updates that this stage had made
    backwards: number of its micro batches whose backward pass has ended on this stage
    sums: all-reduces of tied weights' gradients; None: not started
    """

    index: int
    rate: float
    weights: Version
    updates_when_admitted: int
    backwards: int = 0
    sums: Sequence[dist.Work] | None = None


class UpdateQueue:
    """Minibatches whose gradient is complete on this stage and whose update is not made yet.

    delayed: an update is made when the minibatch after the next is admitted, so that all stages admit each minibatch
        with the same weights (PipeDream-2BW); otherwise at once
    tied: names of weights of which the other end of the pipeline has a copy
    clock: updates are made within the schedule, and are computing
    """

    def __init__(
        self, job: Job, groups: Groups, model: nn.Module, delayed: bool, tied: Sequence[str], clock: BusyClock
    ) -> None:
        self.groups, self.delayed, self.tied, self.clock = groups, delayed, tied, clock
        self.staleness = Staleness(groups.stage_rank, groups.layout.pp)
        self.weights = Weights(model)
        self.optimizer = job.optimizer(self.weights.newest.items())
        self.update = Update(self.optimizer, job)
        # The tied weights' group is their own: both ends send in it between other messages, in another order.
        pairs = groups.layout.embedding_groups()
        self.embedding_group = subgroup(pairs, job, separate=True) if groups.layout.pp > 1 else None
        self.complete: deque[Minibatch] = deque()
        self.admitted = 0

    def admit(self, in_flight: bool) -> Minibatch:
        """The next minibatch, with the newest weights that it may see and the learning rate of its update.

        in_flight: minibatches admitted before still need the weights that they were admitted with
        """
        while self.complete and self.complete[0].index < self.admitted - 1:
            self._apply(self.complete.popleft(), in_flight)
        self.admitted += 1
        rate = self.optimizer.param_groups[0]["lr"]
        return Minibatch(self.admitted - 1, rate, self.weights.version(), self.update.count)

    def enqueue(self, minibatch: Minibatch, in_flight: bool) -> None:
        """The gradient of this minibatch is complete on this stage. in_flight: as in `admit`."""
        with span(COMMUNICATE):  # averages over copies of the stage
            self.groups.reduce([gradient(weight) for weight in minibatch.weights.values()], ())
        self.complete.append(minibatch)
        if not self.delayed:
            self._apply(self.complete.popleft(), in_flight)

    def start_sums(self, before: int) -> None:
        """Start to sum tied weights' gradients over both ends, for each minibatch below this index that has its own.

        The first stage has them p - 1 turns into the next minibatch, the last stage at the end of its own. Both start
        in the next one, after the exchange of a turn: then the sum ends without any later work of this rank's host
        (docs/adr/0014), and both stages, which are p - 1 turns apart, come to it at the same time.
        """
        for minibatch in self.complete:
            if minibatch.sums is None and minibatch.index < before:
                with span(COMMUNICATE):
                    shares = [gradient(minibatch.weights[name]) for name in self.tied]
                    minibatch.sums = [
                        dist.all_reduce(share, group=self.embedding_group, async_op=True) for share in shares
                    ]

    def finish(self) -> None:
        """Make the updates that are left: no minibatch is in flight any more."""
        self.start_sums(before=self.admitted)
        while self.complete:
            self._apply(self.complete.popleft(), in_flight=False)
        self.weights.use(self.weights.newest)
        self.admitted = 0

    def _apply(self, minibatch: Minibatch, in_flight: bool) -> None:
        """Update the newest weights by this minibatch's gradient, at its learning rate; afterwards the optimizer has
        again the rate that the loop has set for the minibatch that it is at."""
        for work in minibatch.sums or ():
            work.wait()
        with self.clock.computing():
            self.staleness.count(self.update.count - minibatch.updates_when_admitted)
            if in_flight:
                self.weights.copy_newest()
            self.weights.take_gradients(minibatch.weights)
            rate = self.optimizer.param_groups[0]["lr"]
            set_learning_rate(self.optimizer, minibatch.rate)
            self.update.apply(self.weights.newest.values())
            set_learning_rate(self.optimizer, rate)
