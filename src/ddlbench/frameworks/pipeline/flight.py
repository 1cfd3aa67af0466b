"""One rank's stage of a pipeline that stays full from minibatch to minibatch: 1F1B without flush.

Here is the order of the passes and of the messages; updates.py has the updates that they make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.link import Link
from ddlbench.frameworks.pipeline.stages import Stage
from ddlbench.frameworks.pipeline.updates import Minibatch, Updates
from ddlbench.frameworks.shared.step import autocast, micro_batches
from ddlbench.job import Batch, Job
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, span


@dataclass(eq=False)
class MicroBatch:
    """A micro batch between its forward and its backward pass on this stage."""

    minibatch: Minibatch
    value: Tensor
    output: Tensor  # on the last stage the loss


class Flight:
    """The micro batches between their forward and their backward pass.

    borders: what passes between the stages, first to last; count: micro batches of an update; wait, shared: see Updates
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
        self.job, self.groups, self.count = job, groups, count
        self.depth = groups.layout.pp - 1 - groups.stage_rank  # forward passes that run ahead of the backward passes
        self.clock = BusyClock(job.device)
        self.model = model
        self.stage = self.clock.computing(Stage(model, job))
        self.loss = self.clock.computing(self._loss)
        self.backward = self.clock.computing(torch.autograd.backward)
        here = groups.stage_rank
        self.before = None if groups.first else self._link(-1, borders[here - 1])
        self.after = None if groups.last else self._link(+1, borders[here])
        self.updates = Updates(job, groups, model, wait, shared, self.clock)
        self.micros: deque[MicroBatch] = deque()
        self.returning: Tensor | None = None  # gradient that the stage before waits for

    def _link(self, way: int, border: Tensor) -> Link:
        return Link(self.job.rank + way * self.groups.layout.dp, self.groups.pp_group, border, self.job.device)

    def step(self, batch: Batch | None) -> Tensor | None:
        """A forward pass of each micro batch of this minibatch, and as many backward passes of those `depth` before."""
        with self.clock.schedule():
            minibatch = self.updates.admit(in_flight=bool(self.micros))
            losses = [self._one_forward_one_backward(minibatch, micro) for micro in self._slices(batch)]
        return torch.stack([loss for loss in losses if loss is not None]).sum() if self.after is None else None

    def _slices(self, batch: Batch | None) -> Sequence[Batch | None]:
        return [None] * self.count if batch is None else list(micro_batches(batch, self.count))

    def _one_forward_one_backward(self, minibatch: Minibatch, micro: Batch | None) -> Tensor | None:
        """The loss, on the last stage. The outputs of others are freed with their backward passes."""
        value = self._arriving(micro).requires_grad_(self.before is not None)
        self.updates.use(minibatch.weights)
        output = self.stage(value)
        if self.after is None:
            assert micro is not None
            output = self.loss(output, micro.targets)
        self.micros.append(MicroBatch(minibatch, value, output))
        full = len(self.micros) > self.depth
        upstream = self.after.exchange(output.detach(), receive=full) if self.after else None
        if full:
            self._backward(upstream)
        self.updates.start_sums(before=self.updates.admitted - 1)
        return output.detach() if self.after is None else None

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
        self.updates.use(minibatch.weights)  # checkpointed blocks run again
        with span(BACKWARD):
            self.backward(oldest.output, upstream)
        self.returning = oldest.value.grad
        minibatch.backwards += 1
        if minibatch.backwards == self.count:
            self.updates.take(minibatch, in_flight=bool(self.micros))

    def drain(self) -> None:
        """Empty the pipeline: each stage sends back the gradient that it holds, gets one, computes the next."""
        while self.micros:
            self._send_back()
            self._backward(self.after.exchange(None, receive=True) if self.after else None)
        self._send_back()
        self.updates.finish()
        self._wait_for_sends()

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
