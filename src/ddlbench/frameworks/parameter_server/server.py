"""A rank's part of the parameter server: the weights that it holds for all ranks, and when they are updated and sent.

Clock t of a rank is its gradient number t, from 0. Update t of a shard is made when it has the gradients of clock t of
all N ranks, by their mean, added in the order of ranks:
    W(t + 1) = W(t) - lr(t) step((g_0 + ... + g_(N-1)) / N)
A rank that has sent c gradients gets the newest W(v) as soon as v >= c - bound (Ho et al. 2013): what it computes with
them at clock c has the staleness c - v <= bound.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.job import Job
from ddlbench.loop import set_learning_rate

GRADIENT, WEIGHTS = 1, 2  # tags of messages


class Server:
    """One thread receives the gradients of other ranks; this rank's own come from its main thread (`accept`).

    A message of n numbers has one more. Behind a gradient it says whether the rank ends its epoch instead (1) and wants
    the weights after all its updates; behind weights it is their staleness.

    weights: by name, on the CPU; only updates change them
    rates: the learning rate of each update that is not made yet
    gradients: for each update that is not made yet: rank -> numbers
    clocks: gradients that each rank has sent
    version: updates made
    wanted: the version that a rank waits for
    """

    def __init__(self, job: Job, weights: Mapping[str, nn.Parameter], bound: int, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks, self.bound, self.group = job.rank, job.world_size, bound, group
        self.weights, self.optimizer = weights, job.optimizer(weights.items())
        self.sizes = [weight.numel() for weight in weights.values()]
        self.rates = dict[int, float]()
        self.gradients = dict[int, dict[int, Tensor]]()
        self.clocks, self.version = [0] * self.ranks, 0
        self.wanted = dict[int, int]()
        self.sending = dict[int, tuple[dist.Work, Tensor]]()
        self.answer: Tensor | None = None  # to this rank
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self) -> None:
        """Serve the other ranks until each of them has ended its epoch."""
        if self.thread is None and self.ranks > 1:
            self.thread = threading.Thread(target=self._serve, name="ddlbench-parameter-server", daemon=True)
            self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()

    def accept(self, rank: int, gradient: Tensor | None) -> None:
        """gradient: of this rank's next clock; None: it ends its epoch"""
        with self.changed:
            if gradient is not None:
                self.gradients.setdefault(self.clocks[rank], {})[rank] = gradient
                self.clocks[rank] += 1
            self.wanted[rank] = self.clocks[rank] - (0 if gradient is None else self.bound)
            while len(self.gradients.get(self.version, ())) == self.ranks:
                self._update(self.gradients.pop(self.version))
            for waiting in [waiting for waiting, version in self.wanted.items() if version <= self.version]:
                del self.wanted[waiting]
                age = torch.full((1,), float(self.clocks[waiting] - self.version))  # for this rank's next gradient
                answer = flat([*self.weights.values(), age])
                if waiting == self.rank:
                    self.answer = answer
                else:
                    self.sending[waiting] = self.group.send([answer], waiting, WEIGHTS), answer
            self.changed.notify_all()

    def take_answer(self) -> Tensor:
        """The weights for this rank's next gradient. Waits for gradients of others; raises what ended the thread."""
        with self.changed:
            self.changed.wait_for(lambda: self.answer is not None or self.error is not None)
            if self.error is not None:
                raise self.error
            assert self.answer is not None
            answer, self.answer = self.answer, None
            return answer

    def _serve(self) -> None:
        try:
            left = self.ranks - 1
            while left:
                message = torch.empty(sum(self.sizes) + 1)
                rank = dist.recv(message, None, self.group, GRADIENT)
                ends = bool(message[-1])
                self.accept(rank, None if ends else message[:-1])
                left -= ends
        except Exception as error:  # the main thread raises it
            with self.changed:
                self.error = error
                self.changed.notify_all()

    @torch.no_grad()
    def _update(self, gradients: Mapping[int, Tensor]) -> None:
        mean = gradients[0] / self.ranks  # as DistributedDataParallel divides before it sums
        for rank in range(1, self.ranks):
            mean += gradients[rank] / self.ranks
        for weight, numbers in zip(self.weights.values(), mean.split(self.sizes), strict=True):
            weight.grad = numbers.view(weight.shape)
        set_learning_rate(self.optimizer, self.rates.pop(self.version))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One row of all numbers, apart from autograd."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
