"""A live stage of PipeDream's pipeline, which is never emptied within an epoch: 1F1B without flush.

Stage s of p (from 0) is p - 1 - s micro batches behind the last stage with its backward passes:

    warm-up       the first p - 1 - s micro batches of an epoch: forward passes alone
    steady state  one forward pass and one backward pass in turn
    cool-down     the end of an epoch: the backward passes that are left

`step` takes one minibatch forward; the backward passes of its last micro batches come in the next `step`, or in
`flush`. What each of p = 3 stages computes in each tick, with one micro batch in each minibatch and with a forward pass
as long as a backward pass: F3 is the forward pass of minibatch 3, B3 its backward pass. `pipedream` makes an update
after each B; once the pipeline is full, no stage waits.

    tick       0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  F2   .   .  B0  F3  B1  F4  B2
    stage 1    .  F0  F1   .  B0  F2  B1  F3  B2  F4
    stage 2    .   .  F0  B0  F1  B1  F2  B2  F3  B3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.checkpoint.live import Live
from ddlbench.frameworks.pipeline.blocks import Blocks
from ddlbench.frameworks.pipeline.clock import BusyClock
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.link import Link
from ddlbench.frameworks.pipeline.updates import Minibatch, UpdateQueue
from ddlbench.frameworks.pipeline.versions import Weights
from ddlbench.frameworks.shared.step import autocast, micro_batches
from ddlbench.job import Batch, Job, Place
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, span


@dataclass(eq=False)
class MicroBatch:
    """A micro batch between its forward and its backward pass on this stage."""

    minibatch: Minibatch
    value: Tensor
    output: Tensor  # on the last stage the loss


class PipeDreamTrainer:
    """One rank's live stage: a `Trainer` (ddlbench/job.py)."""

    job: Job
    groups: Groups
    place: Place
    blocks: Blocks
    model: nn.Sequential
    stage: nn.Module
    before: Link | None  # to the neighbouring stages
    after: Link | None
    micro_batches: int  # in one update
    ahead: int  # forward passes that run ahead of the backward passes
    in_flight: deque[MicroBatch]
    returning: Tensor | None  # gradient that the stage before waits for
    queue: UpdateQueue
    weights: Weights
    optimizer: Optimizer
    clock: BusyClock
    knobs: Mapping[str, Any]  # the facts that are known before the first step

    def __init__(
        self,
        job: Job,
        groups: Groups,
        blocks: Blocks,
        borders: Sequence[Tensor],
        micro_batches: int,
        delayed: bool,
        knobs: Mapping[str, Any],
    ) -> None:
        """borders: what passes between the stages, first to last; delayed: as UpdateQueue takes it"""
        self.job, self.groups, self.blocks, self.model, self.knobs = job, groups, blocks, blocks.model, knobs
        self.place = groups.place()
        (self.stage,) = blocks.stages.values()
        here, dp, pp = groups.stage_rank, groups.layout.dp, groups.layout.pp
        self.before = None if groups.first else Link(job.rank - dp, groups.pp_group, borders[here - 1], job.device)
        self.after = None if groups.last else Link(job.rank + dp, groups.pp_group, borders[here], job.device)
        self.micro_batches, self.ahead = micro_batches, pp - 1 - here
        self.in_flight, self.returning = deque(), None
        shared = {id(parameter) for parameter in blocks.shared}
        tied = [name for name, parameter in self.model.named_parameters() if id(parameter) in shared]
        self.clock = BusyClock(job.device)
        self.queue = UpdateQueue(job, groups, self.model, delayed, tied, self.clock)
        self.weights, self.optimizer = self.queue.weights, self.queue.optimizer

    @property
    def updates(self) -> int:
        return self.queue.update.count

    def step(self, batch: Batch | None) -> Tensor | None:
        self.blocks.statistics.mark_changed()
        with self.clock.schedule():
            minibatch = self.queue.admit(in_flight=bool(self.in_flight))
            losses = [self._one_forward_one_backward(minibatch, micro) for micro in self._slices(batch)]
        return torch.stack([loss for loss in losses if loss is not None]).sum() if self.after is None else None

    def _one_forward_one_backward(self, minibatch: Minibatch, micro: Batch | None) -> Tensor | None:
        """The loss, on the last stage. The outputs of others are freed with their backward passes."""
        output = self._forward(minibatch, micro)
        steady = len(self.in_flight) > self.ahead  # else warm-up: no gradient comes back yet
        upstream = self.after.exchange(output, receive=steady) if self.after else None
        if steady:
            self._backward(upstream)
        self.queue.start_sums(before=self.queue.admitted - 1)
        return output if self.after is None else None

    def flush(self) -> None:
        """Cool-down: each stage sends back the gradient that it holds, gets one and computes the next. Then the updates
        that are left are made."""
        while self.in_flight:
            self._send_back()
            self._backward(self.after.exchange(None, receive=True) if self.after else None)
        self._send_back()
        self.queue.finish()
        self._wait_for_sends()
        self.clock.add_up()
        self.queue.staleness.gather()

    def _slices(self, batch: Batch | None) -> Sequence[Batch | None]:
        return [None] * self.micro_batches if batch is None else list(micro_batches(batch, self.micro_batches))

    def _receive(self, micro: Batch | None) -> Tensor:
        """What goes into this stage; in return the stage before gets the last gradient computed here."""
        if self.before is None:
            assert micro is not None
            return micro.inputs
        value = self.before.exchange(self.returning, receive=True)
        assert value is not None
        self.returning = None
        return value

    def _forward(self, minibatch: Minibatch, micro: Batch | None) -> Tensor:
        """What leaves this stage; on the last one the loss."""
        value = self._receive(micro).requires_grad_(self.before is not None)
        self.weights.use(minibatch.weights)
        with self.clock.computing():
            output = self.stage(value)
        if self.after is None:
            assert micro is not None
            with self.clock.computing(), span(FORWARD), autocast(self.job):
                output = self.job.loss(output, micro.targets) / self.micro_batches
        self.in_flight.append(MicroBatch(minibatch, value, output))
        return output.detach()

    def _backward(self, upstream: Tensor | None) -> None:
        """The backward pass of the oldest micro batch, with the weights of its forward pass. upstream: the gradient of
        its output."""
        oldest = self.in_flight.popleft()
        minibatch = oldest.minibatch
        self.weights.use(minibatch.weights)  # checkpointed blocks run again
        with span(BACKWARD), self.clock.computing():
            torch.autograd.backward(oldest.output, upstream)
        self.returning = oldest.value.grad
        minibatch.backwards += 1
        if minibatch.backwards == self.micro_batches:
            self.queue.enqueue(minibatch, in_flight=bool(self.in_flight))

    def _send_back(self) -> None:
        if self.before is not None and self.returning is not None:
            self.before.exchange(self.returning, receive=False)
        self.returning = None

    def _wait_for_sends(self) -> None:
        for link in (self.before, self.after):
            if link is not None:
                link.wait_for_send()

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        """The newest weights' outputs, on the last stage."""
        self._assert_empty()
        self.blocks.statistics.synchronize()
        self.model.eval()
        outputs: list[Tensor] = []
        with torch.no_grad():
            for micro in self._slices(batch):
                outputs.append(self.stage(self._receive(micro)))
                if self.after is not None:
                    self.after.exchange(outputs.pop(), receive=False)
        self.model.train()
        self._wait_for_sends()
        return torch.cat(outputs) if outputs else None

    def _assert_empty(self) -> None:
        assert not self.in_flight, "flush first"

    def state(self) -> dict[str, Tensor] | None:
        self._assert_empty()
        return self.blocks.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._assert_empty()
        self.blocks.load(state)

    def live(self) -> Live:
        self._assert_empty()
        return Live(self.weights.newest, self.optimizer, dict(self.model.named_buffers()))

    def numbers(self) -> dict[str, Any]:
        return {**self.queue.update.numbers(), "synchronised": self.blocks.statistics.synchronized}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.queue.update.restore(numbers)
        self.blocks.statistics.synchronized = numbers["synchronised"]

    def facts(self) -> dict[str, Any]:
        return {**self.knobs, "staleness": self.queue.staleness.by_stage(), "bubble": self.clock.bubble()}

    def close(self) -> None:
        vars(self).clear()
