"""Notice a loss that is no longer finite, on all ranks at the same step, without making a step wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.errors import Diverged


class Health:
    """A vote in three beats, one every `every` steps: look at the losses on the device, send the answer round,
    act on it. Each beat only picks up what the one before started, so nothing is waited for; and all ranks stop
    together, since a rank that raised alone would leave the others in a collective."""

    def __init__(self, device: torch.device, every: int = 50) -> None:
        self.device = device
        self.every = every
        self.seen = 0
        self.looked: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.vote: tuple[Tensor, dist.Work | None] | None = None

    def watch(self, losses: Sequence[Tensor], step: int) -> None:
        """Call after every step of an epoch with the losses so far; raises Diverged on every rank alike."""
        if (step + 1) % self.every:
            return
        self.count(step)
        self.vote = self._send() if self.looked is not None else None
        self.looked = self._look(losses[self.seen :])
        self.seen = len(losses)

    def count(self, step: int) -> None:
        """Act on the vote that is out, if any; to be called once more at the end of an epoch."""
        vote, self.vote = self.vote, None
        if vote is None:
            return
        answer, work = vote
        if work is not None:
            work.wait()
        if answer.item():
            raise Diverged(f"the loss was no longer finite at step {step}: {REMEDY}")

    def _look(self, losses: Sequence[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
        cuda = self.device.type == "cuda"
        bad = torch.zeros(1, pin_memory=cuda)
        if losses:
            bad.copy_((~torch.stack(list(losses)).isfinite()).any(), non_blocking=True)
        if not cuda:
            return bad, None
        event = torch.cuda.Event()
        event.record()
        return bad, event

    def _send(self) -> tuple[Tensor, dist.Work | None]:
        assert self.looked is not None
        bad, event = self.looked
        if event is not None:
            event.synchronize()
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return bad, None
        # A copy on the CPU travels by gloo, whatever the device's own backend is.
        answer = bad.clone()
        return answer, dist.all_reduce(answer, op=dist.ReduceOp.MAX, async_op=True)


REMEDY = "lower recipe.optimizer.lr, lengthen the warm-up (recipe.schedule.warmup_epochs) or set train.clip_norm"
