"""The interface between loop and frameworks: a framework turns one replica batch into one weight update.

All that the training loop knows about a framework, and all that a framework knows about the run, is in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.errors import WrongRankCount
from ddlbench.recomputation import Choice, Link

type_of_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NamedParameters = Iterable[tuple[str, nn.Parameter]]
_on_meta: dict[tuple[type, str], nn.Sequential] = {}


@dataclass(frozen=True)
class Batch:
    """Samples of one replica.

    inputs:  images [B, 3, H, W] float32, or tokens [B, T] int64
    targets: classes [B] int64, or next tokens [B, T] int64 (-100: not scored)
    valid:   [B] bool, False for the padding of a last validation batch; all True in training
    """

    inputs: Tensor
    targets: Tensor
    valid: Tensor

    def to(self, device: torch.device, channels_last: bool = False) -> Batch:
        """Copy the samples to `device`; copies from pinned memory do not block the host. channels_last: of images"""
        layout = torch.channels_last if channels_last and self.inputs.dim() == 4 else torch.preserve_format
        return Batch(
            self.inputs.to(device, non_blocking=True, memory_format=layout),
            self.targets.to(device, non_blocking=True),
            self.valid.to(device, non_blocking=True),
        )


Score = Callable[[Tensor, Batch], object]  # outputs [B, ...] of the model, and their samples


@dataclass(frozen=True)
class Place:
    """The position of one rank: all that the loop may act on.

    data_rank, data_size: which replica this rank belongs to, and how many there are
    reads_data: whether `step` and `evaluate` want the batch on this rank
    reports:    whether they return something here; exactly one rank of each replica reports
    coordinates: position along dp, tp, pp, sp; labels rows, and stages of a pipeline draw other random numbers
    """

    data_rank: int
    data_size: int
    reads_data: bool = True
    reports: bool = True
    coordinates: Mapping[str, int] = field(default_factory=dict[str, int])


class Model(Protocol):
    """What can be trained. One dataclass a family; its fields are the keys of `model.` in the configuration."""

    name: str
    kind: str  # "images" | "text": which data it takes

    def build(self) -> nn.Sequential:
        """A new model of named blocks on the CPU; its initial weights are drawn from torch's global generator."""
        ...

    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample without the batch: (3, H, W) or (T,)."""
        ...

    def outputs(self) -> int:
        """Number of classes, or size of the vocabulary: the last dimension of the output."""
        ...

    def tensor_plan(self) -> dict[str, str]:
        """How ranks may share the layers: name of a module -> style, one of those of frameworks/tensor/layers.py."""
        ...


def on_meta(job: Job) -> nn.Sequential:
    """The model without its weights. It is built once and shared: do not change it."""
    key = type(job.model), repr(job.model)  # a dataclass, so this says all of it
    if key not in _on_meta:
        with torch.device("meta"):
            _on_meta[key] = job.model.build()
    return _on_meta[key]


def example_batch(model: Model, samples: int) -> Batch:
    """Zeros in the shapes and types of a batch that this model takes, on the default device."""
    text, shape = model.kind == "text", (samples, *model.input_shape())
    inputs = torch.zeros(shape, dtype=torch.int64 if text else torch.float32)
    targets = torch.zeros(shape if text else shape[:1], dtype=torch.int64)
    return Batch(inputs, targets, torch.ones(samples, dtype=torch.bool))


@dataclass(frozen=True)
class Job:
    """The inputs of a framework, the same for every framework.

    local_rank: the number of this rank among the ranks of its node; not always the index of its device
    flops_per_host_byte: FLOPs that the device computes while it copies a byte to or from its host
    links: counts the blocks for a micro batch of this many samples; None: the job takes no budget of activations
    """

    model: Model
    loss: Callable[[Tensor, Tensor], Tensor]  # (output, targets) -> scalar mean over the micro batch
    optimizer: Callable[[NamedParameters], Optimizer]  # sharding changes the parameters: called inside setup
    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    seed: int
    global_batch: int
    micro_batch: int | None
    precision: str = "fp32"
    reduce_dtype: str = "fp32"
    clip_norm: float | None = None
    checkpoint_activations: Choice = False
    offload_activations: Choice = False
    flops_per_host_byte: float = 1e4
    compile: bool = False
    channels_last: bool = False
    timeout_s: float = 600.0
    links: Callable[[Job, float], Sequence[Link]] | None = None

    def build(self) -> nn.Sequential:
        """The whole model on this rank's device, the same bytes on every rank and in every framework."""
        torch.manual_seed(self.seed)
        model = self.model.build().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def replica_batch(self, data_size: int) -> int:
        """Samples of one replica in one update. Raises WrongRankCount if the global batch does not divide."""
        samples, rest = divmod(self.global_batch, data_size)
        if rest:
            fitting = sorted({self.global_batch - rest, self.global_batch - rest + data_size} - {0})
            raise WrongRankCount(
                f"train.global_batch={self.global_batch} does not divide over {data_size} replicas (rest {rest}): "
                f"choose train.global_batch={' or '.join(map(str, fitting))}"
            )
        return samples

    def micro_batches(self, data_size: int) -> int:
        """Micro batches in one update: accumulation for data parallel, chunks for pipelines."""
        replica = self.replica_batch(data_size)
        if self.micro_batch is None:
            return 1
        count, rest = divmod(replica, self.micro_batch)
        if rest or not count:
            small = [n for n in range(1, math.isqrt(replica) + 1) if replica % n == 0]
            fits = max(n for n in [*small, *(replica // n for n in small)] if n <= self.micro_batch)
            raise WrongRankCount(
                f"train.micro_batch={self.micro_batch} does not divide the {replica} samples of a replica "
                f"(train.global_batch={self.global_batch} over {data_size} replicas): choose train.micro_batch={fits}"
            )
        return count


@runtime_checkable
class Framework(Protocol):
    """One way of training in parallel: its configuration. Dataclass fields are the keys of `framework.`."""

    name: str  # of the chosen option

    def check(self, job: Job) -> None:
        """Raise Unsupported or Unavailable for what cannot be run; called on every rank before any group exists."""
        ...

    def setup(self, job: Job) -> Trainer:
        """Build, shard and wrap the model."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """What `Framework.setup` returns: the live model of one rank, and how it is trained."""

    place: Place  # of this rank
    optimizer: Optimizer  # the loop only sets its learning rate

    @property
    def updates(self) -> int:
        """Weight updates really applied: fp16 overflow skips do not count."""
        ...

    def step(self, batch: Batch | None) -> Tensor | None:
        """Forward, backward, update. The replica's mean loss (on device, not waited for) where place.reports."""
        ...

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        """Run the model in evaluation mode, and where place.reports give its outputs to `score`, every sample once, in
        small parts: the outputs of a replica batch would need more memory than training."""
        ...

    def flush(self) -> None:
        """Finish mini-batches still in flight at the end of an epoch."""
        ...

    def state(self) -> dict[str, Tensor] | None:
        """The whole model on the CPU under the original module's names, on rank 0, else None; called on all ranks."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The opposite of `state`, on every rank."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a row should know: stage, bubble, staleness, bucket, ZeRO stage, dtype of reduction."""
        ...

    def close(self) -> None:
        """Forget model and optimizer, and with them this object: process groups are destroyed afterwards."""
        ...
