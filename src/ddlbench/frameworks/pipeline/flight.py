"""One rank's stage of a pipeline that stays full from minibatch to minibatch: 1F1B without flush."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.link import Link
from ddlbench.frameworks.pipeline.stages import Stage
from ddlbench.frameworks.pipeline.versions import Version, Weights
from ddlbench.frameworks.shared.gradients import gradient
from ddlbench.frameworks.shared.groups import subgroup
from ddlbench.frameworks.shared.step import Update, autocast, micro_batches
from ddlbench.job import Batch, Job
from ddlbench.measure.spans import BACKWARD, COMMUNICATE, FORWARD, span


@dataclass(eq=False)
class Minibatch:
    """What one update is made of."""

    index: int  # since the pipeline was empty
    rate: float
    weights: Version
    backwards: int = 0  # micro batches of which this stage has the gradient
    sums: Sequence[dist.Work] | None = None  # of tied weights' gradients; None: not started


@dataclass(eq=False)
class MicroBatch:
    """A micro batch between its forward and its backward pass on this stage."""

    minibatch: Minibatch
    value: Tensor
    output: Tensor  # on the last stage the loss


class Flight:
    """Micro batches on their way, and the updates that they make.

    borders: what passes between the stages, first to last; count: micro batches of an update; wait: make an update only
    when the minibatch after the next is admitted, so that all stages admit each minibatch with the same weights;
    shared: names of weights of which the other end of the pipeline has a copy.
    """

    def __init__(
        self,
        job: Job,
        groups: Groups,
        model: nn.Sequential,
        borders: Sequence[Tensor],
        count: int,
        wait: bool,
        shared: Sequence[str],
    ) -> None:
        self.job, self.groups, self.count, self.wait, self.shared = job, groups, count, wait, shared
        self.depth = groups.layout.pp - 1 - groups.stage_rank  # forward passes that run ahead of the backward passes
        self.clock = BusyClock(job.device)
        self.model = model
        self.stage = self.clock.computing(Stage(model, job))
        self.backward = self.clock.computing(torch.autograd.backward)
        self.weights = Weights(model)
        self.optimizer = job.optimizer(self.weights.newest.items())
        self.update = Update(self.optimizer, job)
        here = groups.stage_rank
        self.before = None if groups.first else self._link(-1, borders[here - 1])
        self.after = None if groups.last else self._link(+1, borders[here])
        # The tied weights' group is their own: both ends send in it between other messages, in another order.
        pairs = groups.layout.embedding_groups()
        self.embedding_group = subgroup(pairs, job, own=True) if groups.layout.pp > 1 else None
        self.micros: deque[MicroBatch] = deque()
        self.due: deque[Minibatch] = deque()  # gradients whole, update not made
        self.admitted = 0
        self.returning: Tensor | None = None  # gradient that the stage before waits for

    def _link(self, way: int, border: Tensor) -> Link:
        return Link(self.job.rank + way * self.groups.layout.dp, self.groups.pp_group, border, self.job.device)

    def step(self, batch: Batch | None) -> Tensor | None:
        """A forward pass of each micro batch of this minibatch, and as many backward passes of those `depth` before."""
        with self.clock.schedule():
            minibatch = self._admit()
            outputs = [self._one_forward_one_backward(minibatch, micro) for micro in self._slices(batch)]
        return torch.stack(outputs).sum() if self.after is None else None

    def _admit(self) -> Minibatch:
        """The next minibatch, with the newest weights that it may see and the rate that its update shall have."""
        while self.due and self.due[0].index < self.admitted - 1:
            self._apply(self.due.popleft())
        self.admitted += 1
        return Minibatch(self.admitted - 1, self.optimizer.param_groups[0]["lr"], self.weights.version())

    def _slices(self, batch: Batch | None) -> Sequence[Batch | None]:
        return [None] * self.count if batch is None else list(micro_batches(batch, self.count))

    def _one_forward_one_backward(self, minibatch: Minibatch, micro: Batch | None) -> Tensor:
        value = self._arriving(micro).requires_grad_(self.before is not None)
        self.weights.use(minibatch.weights)
        output = self.stage(value)
        if self.after is None:
            assert micro is not None
            output = self._loss(output, micro.targets)
        self.micros.append(MicroBatch(minibatch, value, output))
        full = len(self.micros) > self.depth
        upstream = self.after.exchange(output.detach(), receive=full) if self.after else None
        if full:
            self._backward(upstream)
        self._start_sums(before=self.admitted - 1)
        return output.detach()

    def _arriving(self, micro: Batch | None) -> Tensor:
        """What goes into this stage; in return the stage before gets the last gradient computed here."""
        if self.before is None:
            assert micro is not None
            return micro.inputs
        value = self.before.exchange(self.returning, receive=True)
        assert value is not None
        self.returning = None
        return value

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        with span(FORWARD), autocast(self.job):
            return self.job.loss(output, targets) / self.count

    def _backward(self, upstream: Tensor | None) -> None:
        """Of the oldest micro batch, with the weights of its forward pass. upstream: the gradient of its output."""
        oldest = self.micros.popleft()
        minibatch = oldest.minibatch
        self.weights.use(minibatch.weights)  # checkpointed blocks run again
        with span(BACKWARD):
            self.backward(oldest.output, upstream)
        self.returning = oldest.value.grad
        minibatch.backwards += 1
        if minibatch.backwards == self.count:
            self._reduce(minibatch)
            if self.wait:
                self.due.append(minibatch)
            else:
                self._apply(minibatch)

    def _reduce(self, minibatch: Minibatch) -> None:
        """Averages over copies of the stage."""
        with span(COMMUNICATE):
            self.groups.reduce([gradient(weight) for weight in minibatch.weights.values()], ())

    def _start_sums(self, before: int) -> None:
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

    def _apply(self, minibatch: Minibatch) -> None:
        for work in minibatch.sums or ():
            work.wait()
        if self.micros:
            self.weights.part()
        self.weights.take_gradients(minibatch.weights)
        with at_rate(self.optimizer, minibatch.rate):
            self.update.apply(self.weights.newest.values())

    def drain(self) -> None:
        """Empty the pipeline: each stage sends back the gradient that it holds, gets one, computes the next."""
        while self.micros:
            self._send_back()
            self._backward(self.after.exchange(None, receive=True) if self.after else None)
        self._send_back()
        self._start_sums(before=self.admitted)
        while self.due:
            self._apply(self.due.popleft())
        self._wait_for_sends()
        self.weights.use(self.weights.newest)
        self.admitted = 0

    def _send_back(self) -> None:
        if self.before is not None and self.returning is not None:
            self.before.exchange(self.returning, receive=False)
        self.returning = None

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        """The newest weights' outputs, on the last stage; the pipeline must be empty."""
        assert not self.micros, "flush first"
        self.model.eval()
        with torch.no_grad():
            outputs = [self._pass_on(micro) for micro in self._slices(batch)]
        self.model.train()
        self._wait_for_sends()
        return torch.cat(outputs) if self.after is None else None

    def _pass_on(self, micro: Batch | None) -> Tensor:
        output = self.stage(self._arriving(micro))
        if self.after is not None:
            self.after.exchange(output, receive=False)
        return output

    def _wait_for_sends(self) -> None:
        for link in (self.before, self.after):
            if link is not None:
                link.wait_for_send()


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
