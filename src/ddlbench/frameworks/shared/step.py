"""One update of the weights: micro batches under autocast, the loss scale, the optimizer's step; and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.job import Batch, Job, type_of_dtype
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, UPDATE, span

Clip = Callable[[Iterable[nn.Parameter], float], object]  # (parameters, largest norm), gradients in place


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Contiguous slices of a replica batch, equal in size: [B, ...] -> count x [B / count, ...]."""
    parts = (tensor.chunk(count) for tensor in (batch.inputs, batch.targets, batch.valid))
    return (Batch(*part) for part in zip(*parts, strict=True))


def autocast(job: Job) -> AbstractContextManager[object]:
    """Mixed precision over fp32 weights. Enter it once a micro batch: its cache of cast weights must not outlive one
    (sharded frameworks free the weights in between)."""
    return torch.autocast(job.device.type, type_of_dtype[job.precision], enabled=job.precision != "fp32")


def accumulate(
    model: Callable[[Tensor], Tensor],
    batch: Batch,
    job: Job,
    count: int,
    update: Update,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Forward and backward of `count` micro batches; only the last may communicate. The mean loss, on the device."""
    total = torch.zeros((), device=job.device)
    for index, micro in enumerate(micro_batches(batch, count)):
        with nullcontext() if index == count - 1 else no_sync():
            with span(FORWARD), autocast(job):
                loss = job.loss(model(micro.inputs), micro.targets) / count
            with span(BACKWARD):
                update.scale(loss).backward()
            total += loss.detach()
    return total


class Update:
    """One weight update from the gradients in place: unscale, clip, step, forget; and how many there were."""

    def __init__(
        self,
        optimizer: Optimizer,
        job: Job,
        parts: dist.ProcessGroup | None = None,
        clip: Clip = nn.utils.clip_grad_norm_,
    ) -> None:
        """parts: the ranks that hold the other parts of the model: all skip an update if a gradient overflows on one of
        them (None: this rank holds the full model, or its library does this)
        clip: by the norm of the full gradient, also where this rank has only a part of it"""
        self.optimizer, self.clip = optimizer, clip
        self.clip_norm = job.clip_norm
        fp16 = job.precision == "fp16"
        self.agrees = parts is not None and fp16
        if not self.agrees:
            self.scaler = torch.amp.GradScaler(job.device.type, enabled=fp16)
        else:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # takes a while to import

            self.scaler = ShardedGradScaler(job.device.type, process_group=parts)
            # torch makes the scale at the first loss; a rank may have no loss of its own.
            self.scaler.scale(torch.zeros((), device=job.device))
            # This scaler's flag of an overflow has shape (1,), which fused optimizers cannot subtract from their number
            # of steps: the scaler, and not the optimizer, skips an update.
            optimizer._step_supports_amp_scaling = False  # pyright: ignore
        self.count = 0
        # The scaler skips `optimizer.step` when a gradient overflowed: the hook sees the updates really made. A wrapped
        # optimizer calls it more than once an update.
        self.made = False
        optimizer.register_step_post_hook(self._made)

    def _made(self, optimizer: Optimizer, *_: object) -> None:
        """The scaler steps a fused optimizer in any case, which looks for the overflow itself, on the device."""
        overflow = getattr(optimizer, "found_inf", None)
        self.made = overflow is None or not overflow.item()

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        with span(UPDATE):
            if self.clip_norm is not None or self.agrees:
                self.scaler.unscale_(self.optimizer)
            if self.clip_norm is not None:
                self.clip(parameters, self.clip_norm)
            self.made = False
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.count += self.made
            self.optimizer.zero_grad()

    def numbers(self) -> dict[str, Any]:
        """For a checkpoint: the updates so far, and the loss scale."""
        return {"updates": self.count, "scaler": self.scaler.state_dict()}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.count = numbers["updates"]
        self.scaler.load_state_dict(numbers["scaler"])


def evaluate(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Batch, job: Job, count: int) -> Tensor:
    """Outputs [B, ...] in evaluation mode, computed micro batch by micro batch as in training."""
    model.eval()
    with torch.no_grad():
        outputs: list[Tensor] = []
        for micro in micro_batches(batch, count):
            with autocast(job):
                outputs.append(forward(micro.inputs))
    model.train()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
