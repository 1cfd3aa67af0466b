"""What frameworks share, as functions: micro batches, mixed precision, the weight update, BatchNorm, whole states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.batchnorm import batch_norms
from ddlbench.job import Batch, Job, type_of_dtype
from ddlbench.ranks.launch import first_operation, group_timeout

Clip = Callable[[Iterable[nn.Parameter], float], object]  # (parameters, largest norm), gradients in place

_on_meta: dict[tuple[type, str], nn.Sequential] = {}


def check_alike(job: Job, data_size: int) -> None:
    """What no framework here can do."""
    job.micro_batches(data_size)
    if job.compile and job.checkpoint_activations:
        raise Unsupported(
            "train.compile and train.checkpoint_activations do not go together (torch.compile refuses what keeps "
            "BatchNorm's statistics right in the second forward): set one of them to false"
        )


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
            with record_function("ddlbench/forward"), autocast(job):
                loss = job.loss(model(micro.inputs), micro.targets) / count
            with record_function("ddlbench/backward"):
                update.scale(loss).backward()
            total += loss.detach()
    return total


class Update:
    """One weight update from the gradients in place: unscale, clip, step, forget; and how many there were."""

    def __init__(self, optimizer: Optimizer, job: Job, parts: dist.ProcessGroup | None = None) -> None:
        """parts: the ranks with the other parts of the same model, which skip an update where one's gradient overflows
        (where the library that shards does not see to it)."""
        self.optimizer = optimizer
        self.clip_norm = job.clip_norm
        self.scaler = make_scaler(job, parts)
        self.agrees = parts is not None and job.precision == "fp16"
        self.count = 0
        # The scaler skips `optimizer.step` when a gradient overflowed: the hook sees the updates really made. A wrapped
        # optimizer calls it more than once an update.
        self.made = False
        optimizer.register_step_post_hook(self._made)

    def _made(self, optimizer: Optimizer, *_: object) -> None:
        self.made = not overflowed(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def apply(self, parameters: Iterable[nn.Parameter], clip: Clip = nn.utils.clip_grad_norm_) -> None:
        """clip: by the norm of the whole gradient, also where this rank has a part of it only."""
        with record_function("ddlbench/update"):
            if self.clip_norm is not None or self.agrees:
                self.scaler.unscale_(self.optimizer)
            if self.clip_norm is not None:
                clip(parameters, self.clip_norm)
            self.made = False
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.count += self.made
            self.optimizer.zero_grad()


def make_scaler(job: Job, parts: dist.ProcessGroup | None = None) -> torch.amp.GradScaler:
    """Loss scaling for fp16, off for other types."""
    enabled = job.precision == "fp16"
    if not enabled or parts is None:
        return torch.amp.GradScaler(job.device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # takes a while to import

    scaler = ShardedGradScaler(job.device.type, process_group=parts)
    scaler.scale(torch.zeros((), device=job.device))  # torch makes the scale here; a rank may have no loss of its own
    return scaler


def overflowed(optimizer: Optimizer) -> bool:
    """Whether the step just made changed nothing: the scaler steps a fused optimizer in any case, which looks for the
    overflow itself, on the device."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def checkpoint_blocks(model: nn.Sequential) -> None:
    """Every named block keeps its input only and runs again in the backward pass (Chen et al. 2016)."""
    for block in model.children():
        again = partial(_recompute_contexts, block)
        forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=again)
        block.forward = cast(Callable[..., Tensor], forward)


def _recompute_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _frozen_statistics(block)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Generator[None]:
    """The second forward of a checkpointed block must not move BatchNorm's running statistics a second time. With
    momentum 0 they stay, and autograd sees the same operations as in the first forward, which it insists on."""
    norms = [(norm, norm.momentum) for norm in batch_norms(block) if norm.num_batches_tracked is not None]
    for norm, _ in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in norms:
            norm.momentum = momentum
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked -= 1


def has_batch_norm(job: Job) -> bool:
    return bool(batch_norms(on_meta(job)))


def on_meta(job: Job) -> nn.Sequential:
    """The model without its weights. Built once for everybody who asks: look at it, change nothing."""
    key = type(job.model), repr(job.model)  # a dataclass, so this says all of it
    if key not in _on_meta:
        with torch.device("meta"):
            _on_meta[key] = job.model.build()
    return _on_meta[key]


def gradient(parameter: nn.Parameter) -> Tensor:
    """In place: this rank's part of it where the parameter is in shards."""
    assert parameter.grad is not None
    to_local: Callable[[], Tensor] | None = getattr(parameter.grad, "to_local", None)  # DTensor: a second to import
    return to_local() if to_local else parameter.grad


def clip_parts(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    counted: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
) -> None:
    """Clip by the norm of the whole gradient, of which each rank of the group has a part (None: this rank has all).
    counted: the parameters whose gradients no other rank counts."""
    gradients = [gradient(parameter) for parameter in parameters]
    own = nn.utils.get_total_norm([gradient(parameter) for parameter in counted])
    squared = own.square().to(gradients[0].device)  # that of nothing is on the CPU
    if group is not None:
        dist.all_reduce(squared, group=group)
    shrink = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for tensor in gradients:
        tensor *= shrink


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


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy on the CPU, under the module's own names."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def subgroup(lists: Sequence[Sequence[int]], job: Job, own: bool = False) -> dist.ProcessGroup | None:
    """This rank's group of those listed (disjoint lists of ranks), None where it is in none. Called on every rank with
    the same lists. own: a new one also where the list is the whole world, so that what is sent in it keeps no order
    with what others send.

    The group's communicator exists when this returns: NCCL makes it at the group's first operation, which stops the
    host until every member is there, and that belongs to the start and not to a step."""
    if not own and len(lists) == 1 and len(lists[0]) == job.world_size:
        return dist.group.WORLD
    timeout = group_timeout(job.device, job.timeout_s)
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        return None
    first_operation(job.device, group)
    return group
