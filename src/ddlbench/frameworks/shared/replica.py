"""Plain forward and backward passes of a wrapped model: the trainer of `single`, `ddp`, `fsdp`, `horovod`, `local_sgd`,
`tensor` and `spatial`. `RankTrainer` is what it shares with the pipelines' trainers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlbench.checkpoint import Live
from ddlbench.frameworks.shared.batchnorm import Statistics
from ddlbench.frameworks.shared.checkpointing import apply_plan, facts_of_model
from ddlbench.frameworks.shared.step import Update, accumulate, evaluate
from ddlbench.job import Batch, Job, Place


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


def cpu_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """A copy of the full tensors on the CPU by the module's names, empty without `keep`. All ranks that have shards of
    them call it."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if keep:
            state[name] = full.detach().cpu().clone()
    return state


def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load full tensors, which every rank has, where this rank may have shards; nothing is sent."""
    local = dict(state)
    for name, shard in model.state_dict().items():
        if hasattr(shard, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor  # a second to import

            full, to = state[name].to(shard.device), (shard.device_mesh, shard.placements)
            local[name] = distribute_tensor(full, *to, src_data_rank=None)
    model.load_state_dict(local)


class RankTrainer:
    """What all trainers with a torch optimizer have in common, however their model is split: most of a `Trainer`
    (ddlbench/job.py), and what a checkpoint needs."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        update: Update,
        statistics: Statistics,
        place: Place,
        facts: Mapping[str, Any],
        saved_part: str = "model",
    ) -> None:
        """facts: those that are known before the first step
        saved_part: ranks of the same part have the same parameters, or shards of them"""
        self.job, self.model, self.statistics, self.place = job, model, statistics, place
        self.constant_facts = {**facts_of_model(model), **facts}
        self.update, self.optimizer = update, update.optimizer
        self.parameters = dict(model.named_parameters())  # the optimizer's: FSDP puts full ones into the module
        self.saved_part = saved_part

    @property
    def updates(self) -> int:
        return self.update.count

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def facts(self) -> dict[str, Any]:
        return {"staleness": 0, **self.constant_facts}

    def close(self) -> None:
        vars(self).clear()

    def live(self) -> Live:
        return Live(self.parameters, self.optimizer, dict(self.model.named_buffers()), self.saved_part)

    def numbers(self) -> dict[str, Any]:
        return {**self.update.numbers(), "synchronized": self.statistics.synchronized}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.update.restore(numbers)
        self.statistics.synchronized = numbers["synchronized"]


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
        dp_group: dist.ProcessGroup | None = None,
        place: Place | None = None,
        saved_part: str = "model",
    ) -> None:
        """model, trained: the plain model, and the framework's wrapper around it (None: not wrapped)
        no_sync: the context of every micro batch but the last of an update; None: that of DistributedDataParallel
        dp_group: the ranks that average BatchNorm's statistics; None: no average
        place: every rank is a replica if None"""
        place = place or Place(job.rank, job.world_size, coordinates={"dp": job.rank})
        super().__init__(job, model, update, Statistics(model, dp_group), place, facts, saved_part)
        self.trained = model if trained is None else trained
        default = self.trained.no_sync if isinstance(self.trained, DistributedDataParallel) else nullcontext
        self.no_sync = no_sync or default
        self.micro_batches = job.micro_batches(place.data_size)  # in one update
        if job.compile:
            self.trained.compile()

    def step(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        loss = accumulate(self.trained, batch, self.job, self.micro_batches, self.update, self.no_sync)
        self.complete_gradients()
        self.update.apply(self.trained.parameters())
        self.statistics.mark_changed()
        return loss

    def complete_gradients(self) -> None:
        """Before an update: nothing is left to do where the wrapper reduces the gradients."""

    def output(self, inputs: Tensor) -> Tensor:
        """The model's output for a micro batch, complete on every rank."""
        return self.trained(inputs)

    def evaluate(self, batch: Batch | None) -> Tensor | None:
        assert batch is not None
        self.synchronize()
        return evaluate(self.trained, self.output, batch, self.job, self.micro_batches)

    def synchronize(self) -> None:
        """Make the replicas equal, before validation and before the model is saved."""
        self.statistics.synchronize()

    def state(self) -> dict[str, Tensor] | None:
        self.synchronize()
        state = cpu_state(self.model, keep=self.job.rank == 0)
        return state if self.job.rank == 0 else None

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_full_state(self.model, state)
