"""The boundary between two steps: every rank passes it, and all ranks stop at the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import Diverged
from ddlbench.ranks.control import AsyncReduction, barrier

REMEDY = "lower recipe.optimizer.lr, lengthen the warm-up (recipe.schedule.warmup_epochs) or set train.clip_norm"


@dataclass(eq=False)
class Boundary:
    """A heartbeat at every step, a place to stop at, and a vote of all ranks: is a loss not finite?

    Three boundaries, `every` steps apart, make a vote: copy the flag of the losses to the host, send it to all ranks,
    act on the answer. Each picks up what the one before started, so that no step waits for the device or for another
    rank. All ranks stop together: a rank that raised alone would leave the others in a collective. A vote that was sent
    ends without any further call on this rank (docs/adr/0014).

    progressed: called at every step, so that a hang is noticed
    stop: called with a place such as "after step 3 of epoch 0" at every step, every batch of a validation and before
        every epoch; raises Stopped on all ranks (run/stop_request.py)
    before_epoch: called by `begin` on every rank
    """

    device: torch.device
    progressed: Callable[[], None] = lambda: None
    stop: Callable[[str], None] = lambda _: None
    every: int = 50
    before_epoch: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.epoch = 0
        self.steps = 0  # of this epoch
        self._losses = torch.empty(0)
        self.reported = 0  # losses of this rank in this epoch
        self.voted_on = 0  # the first of them
        self.looked: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.vote: AsyncReduction | None = None

    def begin(self, epoch: int, steps: int) -> None:
        """Before an epoch of `steps` steps, outside its clock. All ranks wait for each other. Raises Stopped."""
        self.epoch, self.steps, self.looked, self.vote = epoch, 0, None, None
        self.steps_per_epoch, self.reported, self.voted_on = steps, 0, 0
        barrier()
        self.stop(f"before epoch {epoch}")
        self.before_epoch()

    def heartbeat(self) -> None:
        """Between two pieces of work that are no step of an epoch, as the batches of a validation. Raises Stopped."""
        self.progressed()
        self.stop(f"after the last step of epoch {self.epoch}")

    def pass_step(self, loss: Tensor | None) -> None:
        """After every step of an epoch; loss: a number on the device, None where this rank has none. Raises Diverged
        or Stopped, on every rank."""
        self.progressed()
        self.steps += 1
        self.stop(f"after step {self.steps - 1} of epoch {self.epoch}")
        if loss is not None:
            if self.reported == 0:
                self._losses = torch.empty(self.steps_per_epoch, device=loss.device)
            self._losses[self.reported] = loss  # the host does not wait for it
            self.reported += 1
        if self.steps % self.every:
            return
        self.require_finite()
        not_finite, copied = self.looked or (torch.zeros(1), None)  # the flag of the boundary before
        if copied is not None:
            copied.synchronize()
        # A copy on the CPU is sent by gloo, not by the device's backend.
        self.vote = AsyncReduction(not_finite.clone(), dist.ReduceOp.MAX)
        self.looked = None
        if self.reported > self.voted_on:
            cuda = self.device.type == "cuda"
            not_finite, copied = torch.zeros(1, pin_memory=cuda), torch.cuda.Event() if cuda else None
            not_finite.copy_((~self.losses[self.voted_on :].isfinite()).any(), non_blocking=True)
            if copied is not None:
                copied.record()
            self.looked, self.voted_on = (not_finite, copied), self.reported

    def require_finite(self) -> None:
        """Read the vote that was sent, over all ranks; there is none at an epoch's first boundaries. Called after an
        epoch's last step too. Raises Diverged."""
        vote, self.vote = self.vote, None
        if vote is not None and vote.result()[0]:
            raise Diverged(f"the loss was no longer finite at epoch {self.epoch}, step {self.steps - 1}: {REMEDY}")

    @property
    def losses(self) -> Tensor:
        """This rank's losses in this epoch, one after the other: [reported] on their device, of 32 bits.

        They are in one tensor. A list would keep one small tensor per step between the large blocks that the step
        frees: on the CPU the next step could not reuse them whole, and the process would grow at every step.
        """
        return self._losses[: self.reported]
