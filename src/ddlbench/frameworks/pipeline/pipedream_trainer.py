"""A live stage of PipeDream's pipeline, which is never emptied within an epoch: 1F1B without flush.

Stage s of p (from 0) is p - 1 - s micro batches behind the last stage with its backward passes:

    warm-up       the first p - 1 - s micro batches of an epoch: forward passes alone
    steady state  one forward pass and one backward pass in turn
    cool-down     the end of an epoch: the backward passes that are left

`step` takes one minibatch forward (warm-up and steady state); the backward passes of its last micro batches come in the
next `step`, or in `flush` (cool-down). weights.py says which weights a minibatch sees.

This table shows what each of p = 3 stages computes in each tick, with one micro batch in each minibatch and with a
forward pass as long as a backward pass: F3 is the forward pass of minibatch 3, B3 its backward pass. `pipedream` makes
an update after each B; once the pipeline is full, no stage waits.

    tick       0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  F2   .   .  B0  F3  B1  F4  B2
    stage 1    .  F0  F1   .  B0  F2  B1  F3  B2  F4
    stage 2    .   .  F0  B0  F1  B1  F2  B2  F3  B3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.frameworks.pipeline.rank import Blocks, StagedTrainer
from ddlbench.frameworks.pipeline.weights import Version, Weights
from ddlbench.frameworks.shared.groups import Staleness, average, gradient
from ddlbench.frameworks.shared.replica import Update, autocast, micro_batches
from ddlbench.job import Batch, Job, Score
from ddlbench.loop import set_learning_rate
from ddlbench.measure.profiling.spans import BACKWARD, COMMUNICATE, FORWARD, span


@dataclass(eq=False)
class Minibatch:
    """The samples of one update, on one stage.

    rate: learning rate of its update
    weights: the version that all its passes on this stage see
    updates_when_admitted: number of updates that this stage had made
    left: number of its micro batches whose backward pass on this stage has not ended
    sums: all-reduces of tied weights' gradients; None: not started
    """

    rate: float
    weights: Version
    updates_when_admitted: int
    left: int
    sums: Sequence[dist.Work] | None = None


class PipeDreamTrainer(StagedTrainer):
    """One rank's live stage: a `Trainer` (ddlbench/job.py).

    before, after: links to the neighbouring stages; links: those that there are
    ahead: forward passes that run ahead of the backward passes
    in_flight: micro batches that wait for their backward pass: input and output (on the last stage the loss) of each
    pending: minibatches whose update is not made yet on this stage, in their order; the last one is at its forward pass
    returning: the gradient that the stage before waits for
    tied: names of weights of which the other end of the pipeline has a copy
    """

    def __init__(
        self, job: Job, blocks: Blocks, weights: Weights, micro_batches: int, delayed: bool, facts: Mapping[str, Any]
    ) -> None:
        """delayed: an update is made when the minibatch after the next is admitted, so that all stages admit each
        minibatch with the same weights (PipeDream-2BW); otherwise as soon as its gradient is complete"""
        groups, boundaries, model = blocks.groups, blocks.plan.between, blocks.model
        update = Update(job.optimizer(weights.newest.items()), job)
        super().__init__(job, blocks, update, micro_batches, facts, "model")
        self.weights = self.kept = weights
        self.delayed = delayed
        (self.stage,) = blocks.stages.values()
        here, dp, pp = groups.stage_rank, groups.layout.dp, groups.layout.pp
        self.staleness = Staleness(here, pp)
        self.before = None if groups.first else Link(job.rank - dp, groups.pp_group, boundaries[here - 1], job.device)
        self.after = None if groups.last else Link(job.rank + dp, groups.pp_group, boundaries[here], job.device)
        self.links = [link for link in (self.before, self.after) if link is not None]
        self.ahead = pp - 1 - here
        self.in_flight, self.pending = deque[tuple[Minibatch, Tensor, Tensor]](), deque[Minibatch]()
        self.returning: Tensor | None = None
        shared = {id(parameter) for parameter in blocks.shared}
        self.tied = [name for name, parameter in model.named_parameters() if id(parameter) in shared]

    def step(self, batch: Batch | None) -> Tensor | None:
        """Warm-up and steady state."""
        self.synchronized = False
        losses: list[Tensor] = []
        with self.clock.schedule():
            self._make_updates(keep=1)
            # It sees the newest weights that it may see, and its update has the learning rate of this step.
            rate = self.optimizer.param_groups[0]["lr"]
            version = self.weights.version(self.optimizer, [earlier.rate for earlier in self.pending])
            minibatch = Minibatch(rate, version, self.updates, self.micro_batches)
            self.pending.append(minibatch)
            for micro in self._slices(batch):
                output = self._forward(minibatch, micro)
                steady = len(self.in_flight) > self.ahead  # else warm-up: no gradient comes back yet
                upstream = self.after.exchange(output, receive=steady) if self.after else None
                if steady:
                    self._backward(upstream)
                self._start_sums([*self.pending][:-1])
                if self.after is None:
                    losses.append(output)
                del output, upstream  # their memory is free before the next forward pass
        return torch.stack(losses).sum() if losses else None

    def flush(self) -> None:
        """Cool-down: each stage sends back the gradient that it holds, gets one and computes the next. Then the updates
        that are left are made."""
        while self.in_flight:
            self._send_back()
            self._backward(self.after.exchange(None, receive=True) if self.after else None)
        self._send_back()
        self._start_sums(self.pending)
        self._make_updates(keep=0)
        self.weights.use(self.weights.newest)
        for link in self.links:
            link.wait_for_send()
        self.clock.add_up()
        self.staleness.gather()

    def _slices(self, batch: Batch | None) -> Sequence[Batch | None]:
        return [None] * self.micro_batches if batch is None else list(micro_batches(batch, self.micro_batches))

    def _receive(self, micro: Batch | None) -> Tensor:
        """The input of this stage; in exchange the stage before gets the last gradient computed here."""
        if self.before is None:
            assert micro is not None
            return micro.inputs
        value = self.before.exchange(self.returning, receive=True)
        assert value is not None
        self.returning = None
        return value

    def _forward(self, minibatch: Minibatch, micro: Batch | None) -> Tensor:
        """The output of this stage; on the last one the loss."""
        value = self._receive(micro).requires_grad_(self.before is not None)
        self.weights.use(minibatch.weights)
        with self.clock.computing():
            output = self.stage(value)
        if self.after is None:
            assert micro is not None
            with self.clock.computing(), span(FORWARD), autocast(self.job):
                output = self.job.loss(output, micro.targets) / self.micro_batches
        self.in_flight.append((minibatch, value, output))
        return output.detach()

    def _backward(self, upstream: Tensor | None) -> None:
        """The backward pass of the oldest micro batch, with the weights of its forward pass. upstream: the gradient of
        its output."""
        minibatch, value, output = self.in_flight.popleft()
        self.weights.use(minibatch.weights)  # checkpointed blocks run again
        age = self.updates - minibatch.updates_when_admitted
        with span(BACKWARD), self.clock.computing(), self.weights.backward(age):
            torch.autograd.backward(output, upstream)
        self.returning = value.grad
        minibatch.left -= 1
        if minibatch.left:
            return
        if self.dp_group is not None:
            with span(COMMUNICATE):
                average([gradient(weight) for weight in minibatch.weights.values()], self.dp_group)
        if not self.delayed:
            self._make_updates(keep=0)

    def _start_sums(self, minibatches: Iterable[Minibatch]) -> None:
        """Start to sum tied weights' gradients over both ends, where the gradient of a minibatch is complete.

        The first stage has them p - 1 turns into the next minibatch, the last stage at the end of its own. Both start
        in the next one, after the exchange of a turn: then the sum ends without any later work of this rank's host
        (docs/adr/0014), and both stages, which are p - 1 turns apart, start it at the same time.
        """
        for minibatch in minibatches:
            if not minibatch.left and minibatch.sums is None:
                with span(COMMUNICATE):
                    shares = [gradient(minibatch.weights[name]) for name in self.tied]
                    group = self.groups.embedding_group
                    minibatch.sums = [dist.all_reduce(share, group=group, async_op=True) for share in shares]

    def _make_updates(self, keep: int) -> None:
        """Update the newest weights by each complete gradient, at the learning rate of its minibatch, but not by those
        of the last `keep` minibatches; afterwards the optimizer has again the rate that the loop has set for the
        minibatch that it is at."""
        while len(self.pending) > keep and not self.pending[0].left:
            minibatch = self.pending.popleft()
            for work in minibatch.sums or ():
                work.wait()
            needed = any(later.left for later in self.pending)  # whether minibatches need the weights that they saw
            with self.clock.computing():
                self.staleness.count(self.updates - minibatch.updates_when_admitted)
                with self.weights.updating(minibatch.weights, needed):
                    rate = self.optimizer.param_groups[0]["lr"]
                    set_learning_rate(self.optimizer, self.weights.rate(minibatch.rate, self.updates))
                    self.update.apply(self.weights.newest.values())
                set_learning_rate(self.optimizer, rate)

    def _send_back(self) -> None:
        if self.before is not None and self.returning is not None:
            self.before.exchange(self.returning, receive=False)
        self.returning = None

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        """Score the newest weights' outputs, on the last stage."""
        assert not self.in_flight, "flush first"
        self.synchronize()
        self.model.eval()
        with torch.no_grad():
            for micro in self._slices(batch):
                output = self.stage(self._receive(micro))
                if self.after is not None:
                    self.after.exchange(output, receive=False)
                elif micro is not None:
                    score(output, micro)
                del output
        self.model.train()
        for link in self.links:
            link.wait_for_send()

    def state(self) -> dict[str, Tensor] | None:
        assert not self.in_flight, "flush first"
        return super().state()

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "staleness": self.staleness.by_stage()}


class Link:
    """The link to a neighbouring stage: both exchange activations for gradients, and no ranks wait in a circle.

    In each turn an end starts its send and its receive together, and both ends take the same turns. So a send may end
    at once (gloo), or only when its receiver is ready and all that was started before has ended (NCCL): if rank r and
    rank r + 1 exchange in turn k, every rank takes its turns in the order of (k, r), and an order has no circles.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup | None, border: Tensor, device: torch.device) -> None:
        """peer: global rank; border: has the shape and the type of what is sent in both directions"""
        self.peer, self.group, self.border, self.device = peer, group, border, device
        self.sending: tuple[Tensor | None, list[dist.Work]] = None, []

    def exchange(self, outgoing: Tensor | None, receive: bool) -> Tensor | None:
        """Start to send `outgoing`, if any; with `receive` wait for what the peer sends, and return it."""
        self.wait_for_send()
        operations: list[dist.P2POp] = []
        if outgoing is not None:
            outgoing = outgoing.contiguous()
            assert (outgoing.shape, outgoing.dtype) == (self.border.shape, self.border.dtype)
            operations.append(dist.P2POp(dist.isend, outgoing, self.peer, self.group))
        incoming = None
        if receive:
            incoming = torch.empty(self.border.shape, dtype=self.border.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, incoming, self.peer, self.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        if receive:
            works.pop().wait()  # the receive is the last; NCCL has one work for all operations
        self.sending = outgoing, works
        return incoming

    def wait_for_send(self) -> None:
        """Wait until the last send has ended: its memory is needed until then."""
        for work in self.sending[1]:
            work.wait()
        self.sending = None, []
