"""Plain forward and backward passes of a wrapped model: the trainer of `single`, `ddp`, `fsdp`, `horovod`, `local_sgd`,
`tensor` and `spatial`. `RankTrainer` is what it shares with the pipelines' trainers, `Update` with all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddlbench.checkpoint import Kept, Live
from ddlbench.frameworks.shared.checkpointing import apply_plan, facts_of_model
from ddlbench.frameworks.shared.groups import average_statistics, cpu_state, load_full_state
from ddlbench.job import Batch, Job, Place, Score, type_of_dtype
from ddlbench.measure.profiling.spans import BACKWARD, FORWARD, UPDATE, span

Clip = Callable[[Iterable[nn.Parameter], float], object]  # (parameters, largest norm), gradients in place


def build(job: Job) -> nn.Sequential:
    """The full model on this rank's device, with the segments and offloaded blocks that the job asks every rank for."""
    model = job.build()
    apply_plan(model, job, job.world_size)
    return model


def in_ddp(model: nn.Module, reduce_dtype: str, group: dist.ProcessGroup, **knobs: Any) -> DistributedDataParallel:
    """The model in DistributedDataParallel. reduce_dtype: what gradients are cast to before they are sent (fp16, bf16),
    else their type; noop: they are not sent; group: the replicas; knobs: of DistributedDataParallel"""
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    # BatchNorm's statistics are averaged before validation, not sent at every step. torch 2.14 renamed the switch.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    knobs |= {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    # Every rank builds the same weights from the seed.
    wrapped = DistributedDataParallel(model, process_group=group, init_sync=False, **knobs)
    hooks = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "noop": debugging_hooks.noop_hook,
    }
    if reduce_dtype in hooks:
        wrapped.register_comm_hook(group, hooks[reduce_dtype])
    return wrapped


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
                update.scaler.scale(loss).backward()
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
        clip: clips by the norm of the full gradient, also if this rank has only a part of it"""
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


def evaluate(
    model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Batch, job: Job, count: int, score: Score
) -> None:
    """Score the outputs [B / count, ...] in evaluation mode, micro batch by micro batch as in training."""
    model.eval()
    with torch.no_grad():
        for micro in micro_batches(batch, count):
            with autocast(job):
                output = forward(micro.inputs)
            score(output, micro)
            del output  # its memory is free before the next forward pass
    model.train()


class RankTrainer:
    """What all trainers with a torch optimizer have in common, however their model is split: most of a `Trainer`
    (ddlbench/job.py), and what a checkpoint needs."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        update: Update,
        facts: Mapping[str, Any],
        *,
        dp_group: dist.ProcessGroup | None = None,
        place: Place | None = None,
        saved_part: str = "model",
    ) -> None:
        """facts: those that are known before the first step
        dp_group: the ranks that average BatchNorm's statistics; None: no average
        place: every rank is a replica if None
        saved_part: ranks of the same part have the same parameters, or shards of them"""
        self.job, self.model, self.dp_group = job, model, dp_group
        self.place = place or Place(job.rank, job.world_size, coordinates={"dp": job.rank})
        self.synchronized = True  # whether BatchNorm's statistics are those of all replicas
        self.constant_facts = {**facts_of_model(model), **facts}
        self.update, self.optimizer = update, update.optimizer
        self.parameters = dict(model.named_parameters())  # the optimizer's: FSDP puts full ones into the module
        self.saved_part, self.kept = saved_part, Kept()

    @property
    def updates(self) -> int:
        return self.update.count

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def synchronize(self) -> None:
        """Make the replicas equal, before validation and before the model is saved: each has its own statistics of
        BatchNorm while it trains (docs/adr/0001)."""
        if not self.synchronized and self.dp_group is not None:
            average_statistics(self.model, self.dp_group)
        self.synchronized = True

    def facts(self) -> dict[str, Any]:
        return {"staleness": 0, **self.constant_facts}

    def close(self) -> None:
        vars(self).clear()

    def live(self) -> Live:
        rank_tensors = {**dict(self.model.named_buffers()), **self.kept.tensors()}
        return Live(self.parameters, self.optimizer, rank_tensors, self.saved_part)

    def numbers(self) -> dict[str, Any]:
        scaler = self.update.scaler.state_dict()  # the loss scale
        numbers = {"updates": self.update.count, "scaler": scaler, "synchronized": self.synchronized}
        return {**numbers, **self.kept.numbers()}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.update.count, self.synchronized = numbers["updates"], numbers["synchronized"]
        self.update.scaler.load_state_dict(numbers["scaler"])
        self.kept.restore(numbers)


class Replica(RankTrainer):
    """One rank's live replica: a `Trainer`."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        update: Update,
        facts: Mapping[str, Any],
        *,
        trained: nn.Module | None = None,
        no_sync: Callable[[], AbstractContextManager[object]] | None = None,
        **options: Any,
    ) -> None:
        """model, trained: the plain model, and the framework's wrapper around it (None: not wrapped)
        no_sync: the context of every micro batch but the last of an update; None: that of DistributedDataParallel
        options: of `RankTrainer`"""
        super().__init__(job, model, update, facts, **options)
        self.trained = model if trained is None else trained
        default = self.trained.no_sync if isinstance(self.trained, DistributedDataParallel) else nullcontext
        self.no_sync = no_sync or default
        self.micro_batches = job.micro_batches(self.place.data_size)  # in one update
        if job.compile:
            self.trained.compile()

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.trained, batch, self.job, self.micro_batches, self.update, self.no_sync)
        self.complete_gradients()
        self.update.apply(self.trained.parameters())
        self.synchronized = False
        return loss

    def complete_gradients(self) -> None:
        """Before an update: nothing is left to do where the wrapper reduces the gradients."""

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        assert batch is not None
        self.synchronize()
        evaluate(self.trained, self.trained, batch, self.job, self.micro_batches, score)

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        state = cpu_state(self.model, keep=self.job.rank == 0)
        return state if self.job.rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_full_state(self.model, state)
