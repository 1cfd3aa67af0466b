"""The updates of a pipeline that stays full: which version of the weights a minibatch sees, when its gradient is
applied, and how old its weights are by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.weights import Version, Weights
from ddlbench.frameworks.shared.groups import average, gradient, subgroup
from ddlbench.frameworks.shared.staleness import Staleness
from ddlbench.frameworks.shared.step import Update
from ddlbench.job import Job
from ddlbench.loop import set_learning_rate
from ddlbench.measure.profiling.spans import COMMUNICATE, span


@dataclass(eq=False)
class Minibatch:
    """The samples of one update, on one stage.

    index: counted since the pipeline was empty
    rate: learning rate of its update
    weights: the version that all its passes on this stage see
    updates_when_admitted: number of updates that this stage had made
    backwards: number of its micro batches whose backward pass has ended on this stage
    complete: whether all have, and its gradient is averaged over the copies of the stage
    sums: all-reduces of tied weights' gradients; None: not started
    """

    index: int
    rate: float
    weights: Version
    updates_when_admitted: int
    backwards: int = 0
    complete: bool = False
    sums: Sequence[dist.Work] | None = None


class UpdateQueue:
    """Minibatches whose update is not made yet on this stage (`pending`), in their order.

    delayed: an update is made when the minibatch after the next is admitted, so that all stages admit each minibatch
        with the same weights (PipeDream-2BW); otherwise as soon as its gradient is complete
    tied: names of weights of which the other end of the pipeline has a copy
    clock: updates are made within the schedule, and are computing
    """

    def __init__(
        self, job: Job, groups: Groups, weights: Weights, delayed: bool, tied: Sequence[str], clock: BusyClock
    ) -> None:
        self.groups, self.delayed, self.tied, self.clock = groups, delayed, tied, clock
        self.staleness = Staleness(groups.stage_rank, groups.layout.pp)
        self.weights = weights
        self.optimizer = job.optimizer(self.weights.newest.items())
        self.update = Update(self.optimizer, job)
        # The tied weights' group is their own: both ends send in it between other messages, in another order.
        pairs = groups.layout.embedding_groups()
        self.embedding_group = subgroup(pairs, job, separate=True) if groups.layout.pp > 1 else None
        self.pending = deque[Minibatch]()
        self.admitted = 0

    def admit(self) -> Minibatch:
        """The next minibatch, with the newest weights that it may see and the learning rate of its update."""
        self._apply(before=self.admitted - 1)
        rate = self.optimizer.param_groups[0]["lr"]
        version = self.weights.version(self.optimizer, [earlier.rate for earlier in self.pending])
        minibatch = Minibatch(self.admitted, rate, version, self.update.count)
        self.pending.append(minibatch)
        self.admitted += 1
        return minibatch

    def backward_done(self, minibatch: Minibatch) -> None:
        """All backward passes of this minibatch have ended on this stage."""
        if self.groups.dp_group is not None:
            with span(COMMUNICATE):
                average([gradient(weight) for weight in minibatch.weights.values()], self.groups.dp_group)
        minibatch.complete = True
        if not self.delayed:
            self._apply(before=self.admitted)

    def age(self, minibatch: Minibatch) -> int:
        """Updates of this stage since the minibatch was admitted."""
        return self.update.count - minibatch.updates_when_admitted

    def start_sums(self, before: int) -> None:
        """Start to sum tied weights' gradients over both ends, for each minibatch below this index that has its own.

        The first stage has them p - 1 turns into the next minibatch, the last stage at the end of its own. Both start
        in the next one, after the exchange of a turn: then the sum ends without any later work of this rank's host
        (docs/adr/0014), and both stages, which are p - 1 turns apart, come to it at the same time.
        """
        for minibatch in self.pending:
            if minibatch.complete and minibatch.sums is None and minibatch.index < before:
                with span(COMMUNICATE):
                    shares = [gradient(minibatch.weights[name]) for name in self.tied]
                    minibatch.sums = [
                        dist.all_reduce(share, group=self.embedding_group, async_op=True) for share in shares
                    ]

    def finish(self) -> None:
        """Make the updates that are left: all gradients are complete."""
        self.start_sums(before=self.admitted)
        self._apply(before=self.admitted)
        self.weights.use(self.weights.newest)
        self.admitted = 0

    def _apply(self, before: int) -> None:
        """Update the newest weights by each complete gradient below this index, at the learning rate of its minibatch;
        afterwards the optimizer has again the rate that the loop has set for the minibatch that it is at."""
        while self.pending and self.pending[0].complete and self.pending[0].index < before:
            minibatch = self.pending.popleft()
            for work in minibatch.sums or ():
                work.wait()
            in_flight = any(not later.complete for later in self.pending)  # these need the weights that they have seen
            with self.clock.computing():
                self.staleness.count(self.age(minibatch))
                with self.weights.updating(in_flight):
                    self.weights.take_gradients(minibatch.weights)
                    rate = self.optimizer.param_groups[0]["lr"]
                    set_learning_rate(self.optimizer, self.weights.rate(minibatch.rate, self.update.count))
                    self.update.apply(self.weights.newest.values())
                set_learning_rate(self.optimizer, rate)
