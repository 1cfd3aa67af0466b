"""The boundary between two steps: every rank passes it, and all ranks stop at the same one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import Diverged, Killed
from ddlbench.ranks.control import single_process, sum_over_ranks


class Boundary:
    """A heartbeat at every step, and one vote of all ranks over two flags: a loss is not finite, a rank asks to stop.

    Three boundaries, `every` steps apart, make a vote: copy the flag of the losses to the host, send both flags to all
    ranks, act on the answer. Each picks up what the one before started, so that no step waits for the device or for
    another rank. All ranks stop together: a rank that raised alone would leave the others in a collective. A vote in
    flight ends without further work of this rank's host (docs/adr/0014).

    heartbeat: called at every step, so that a hang is noticed
    stop_asked: whether this rank asks all ranks to stop
    before_epoch: called by `begin` on every rank
    """

    def __init__(
        self,
        device: torch.device,
        heartbeat: Callable[[], None] = lambda: None,
        stop_asked: Callable[[], bool] = lambda: False,
        every: int = 50,
        before_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.heartbeat = heartbeat
        self.stop_asked = stop_asked
        self.every = every
        self.before_epoch = before_epoch
        self.steps = 0  # of this epoch
        self.losses: list[Tensor] = []  # not looked at yet
        self.looked: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.vote: tuple[Tensor, dist.Work | None] | None = None

    def begin(self) -> None:
        """Before an epoch, outside its clock. All ranks wait for each other; raises Killed on all where one asks."""
        self.steps, self.losses, self.looked, self.vote = 0, [], None, None
        if sum_over_ranks(torch.tensor([float(self.stop_asked())])).item():
            raise Killed("stopped before an epoch, as a rank asked")
        self.before_epoch()

    def pass_step(self, loss: Tensor | None) -> None:
        """After every step of an epoch; loss: a number on the device, None where this rank has none. Raises Diverged
        or Killed, on every rank."""
        self.heartbeat()
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)
        if self.steps % self.every:
            return
        not_finite, stop = self._answer()
        self._require_finite(not_finite, self.steps - 1)
        if stop:
            raise Killed(f"stopped at step {self.steps - 1} of an epoch, as a rank asked")
        self.vote = self._send()
        self.looked = self._look() if self.losses else None

    def end(self) -> None:
        """After an epoch's last step. Raises Diverged. Killed waits for `begin`: this epoch is whole, so its row is
        recorded first."""
        not_finite, _ = self._answer()
        self._require_finite(not_finite, self.steps)

    def _require_finite(self, not_finite: bool, step: int) -> None:
        if not_finite:
            raise Diverged(f"the loss was no longer finite at step {step}: {REMEDY}")

    def _look(self) -> tuple[Tensor, torch.cuda.Event | None]:
        cuda = self.device.type == "cuda"
        not_finite = torch.zeros(1, pin_memory=cuda)
        not_finite.copy_((~torch.stack(self.losses).isfinite()).any(), non_blocking=True)
        self.losses = []
        if not cuda:
            return not_finite, None
        event = torch.cuda.Event()
        event.record()
        return not_finite, event

    def _send(self) -> tuple[Tensor, dist.Work | None]:
        not_finite, event = self.looked or (torch.zeros(1), None)
        if event is not None:
            event.synchronize()
        # A copy on the CPU travels by gloo, whatever the device's own backend is.
        flags = torch.cat([not_finite, torch.tensor([float(self.stop_asked())])])
        return flags, None if single_process() else dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)

    def _answer(self) -> tuple[bool, bool]:
        """The flags of the vote that was sent, over all ranks; there is none at an epoch's first boundaries."""
        vote, self.vote = self.vote, None
        if vote is None:
            return False, False
        flags, work = vote
        if work is not None:
            work.wait()
        not_finite, stop = flags.bool().tolist()
        return not_finite, stop


REMEDY = "lower recipe.optimizer.lr, lengthen the warm-up (recipe.schedule.warmup_epochs) or set train.clip_norm"
