"""Collectives with gradients, over ranks that share every layer; the loss of logits of which each has some classes.

Shoeybi et al. 2019, "Megatron-LM" (operators f and g, section 3; the cross-entropy, which sends nothing of the size of
the logits); Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (the operators of
sequence parallelism, section 4.2). They are named as Megatron-LM names its functions: `copy_to` is
copy_to_tensor_model_parallel_region.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ddlbench.frameworks.shared.groups import subgroup
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.frameworks.shared.replica import micro_batches
from ddlbench.job import Batch, Job, Place, Score, example_batch
from ddlbench.recipe.recipe import IGNORED, CrossEntropy

Change = Callable[[Tensor], Tensor]

# torch 2.14 renamed both.
all_gather = getattr(dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor")
reduce_scatter = getattr(
    dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@dataclass(frozen=True)
class Part:
    """This rank's part among `size` ranks that share every layer.

    sequence: between the parallel layers each rank has its slice of the tokens [B, T / size, E], not all of them
    adds_bf16: whether the backend adds up bf16: gloo cannot, so ranks on CPUs add in fp32
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence: bool = False
    adds_bf16: bool = False

    def span(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """First index and count of a rank's slice of `length`; slices differ by one at most, the first are longer."""
        rank = self.rank if rank is None else rank
        count, longer = divmod(length, self.size)
        return rank * count + min(rank, longer), count + (rank < longer)


Mesh = tuple[Part, Place, dist.ProcessGroup | None]


def connect_parts(job: Job, layout: Layout, axis: str = "tp", separate: bool = False) -> Mesh:
    """This rank's part and place in a mesh of replicas and parts, and the ranks that have the same part in the other
    replicas (None: there is one replica). Part 0 reads the data and reports. All ranks call this.

    axis: name of the parts' dimension in the rank's coordinates; separate: of the parts' group, as `subgroup` takes it
    """
    data_rank, rank, _ = layout.position(job.rank)
    group = subgroup(layout.groups("tp"), job, separate) if layout.tp > 1 else None
    dp_group = subgroup(layout.groups("dp"), job) if layout.dp > 1 else None
    place = Place(data_rank, layout.dp, rank == 0, rank == 0, {"dp": data_rank, axis: rank})
    return Part(group, rank, layout.tp, adds_bf16=job.device.type == "cuda"), place, dp_group


def copy_to(tensor: Tensor, part: Part) -> Tensor:
    """Before a layer of which this rank has a part: its gradient is a part of the sum (Megatron's f)."""
    return _collective(tensor, lambda x: x.view_as(x), lambda gradient: total(gradient, part))


def reduce_from(partial: Tensor, part: Part) -> Tensor:
    """The sum over ranks of what each computed a part of (Megatron's g)."""
    return _collective(partial, lambda x: total(x, part), lambda gradient: gradient)


def scatter_to(full: Tensor, dim: int, part: Part) -> Tensor:
    """This rank's slice along `dim` of what every rank has; the gradients of all slices are joined."""
    length = full.shape[dim]
    return _collective(full, lambda x: x.narrow(dim, *part.span(length)), lambda x: join(x, dim, length, part))


def gather_from(slice_: Tensor, dim: int, length: int, part: Part) -> Tensor:
    """All ranks' slices joined along `dim` to `length`, for what every rank computes in the same way from there on."""
    span = part.span(length)
    return _collective(slice_, lambda x: join(x, dim, length, part), lambda gradient: gradient.narrow(dim, *span))


def in_autocast_type(value: Tensor) -> Tensor:
    """The value in the type of matrix products and convolutions, so that autocast sends no wider type."""
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def gather_from_sequence(slice_: Tensor, dim: int, part: Part) -> Tensor:
    """`copy_to` where each rank has its slice along `dim` only."""
    length = slice_.shape[dim] * part.size
    return _collective(slice_, lambda x: join(x, dim, length, part), lambda gradient: sum_slices(gradient, dim, part))


def reduce_scatter_to_sequence(partial: Tensor, dim: int, part: Part) -> Tensor:
    """`reduce_from` where each rank keeps its slice along `dim` only."""
    length = partial.shape[dim]
    return _collective(partial, lambda x: sum_slices(x, dim, part), lambda gradient: join(gradient, dim, length, part))


def total(tensor: Tensor, part: Part) -> Tensor:
    """A new tensor: the sum over ranks."""
    result = tensor.to(sum_type(tensor.dtype, part.adds_bf16), copy=True, memory_format=layout_of(tensor))
    dist.all_reduce(dense(result), group=part.group)
    return result.to(tensor.dtype)


def sum_slices(tensor: Tensor, dim: int, part: Part) -> Tensor:
    """This rank's slice along `dim`, which all ranks divide evenly, of the sum over ranks."""
    slices = torch.stack(tensor.chunk(part.size, dim)).to(sum_type(tensor.dtype, part.adds_bf16))
    result = slices.new_empty(slices.shape[1:])
    reduce_scatter(dense(result), slices.flatten(), group=part.group)
    return result.to(tensor.dtype)


def join(slice_: Tensor, dim: int, length: int, part: Part) -> Tensor:
    """Slices of all ranks joined along `dim`, in the same memory format. The longest slice sets what travels."""
    missing = part.span(length, 0)[1] - slice_.shape[dim]
    if missing:
        slice_ = F.pad(slice_, [0, 0] * (slice_.ndim - 1 - dim % slice_.ndim) + [0, missing])
    slice_ = slice_.contiguous(memory_format=layout_of(slice_))
    flat = slice_.new_empty(part.size * slice_.numel())
    all_gather(flat, dense(slice_), group=part.group)
    slices = [padded.as_strided(slice_.shape, slice_.stride()) for padded in flat.chunk(part.size)]
    return torch.cat([padded.narrow(dim, 0, part.span(length, i)[1]) for i, padded in enumerate(slices)], dim)


def layout_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format


def dense(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps as one dimension: collectives can send it in any layout."""
    assert tensor.is_contiguous(memory_format=layout_of(tensor))
    return tensor.as_strided((tensor.numel(),), (1,))


def share(batch: Batch | None, job: Job, size: int, part: Part) -> Batch:
    """A replica's batch of `size` samples on all its ranks: the first read it, the others get inputs and targets."""
    assert batch is not None or part.rank > 0
    if batch is None:
        with job.device:
            batch = example_batch(job.model, size)
    images = batch.inputs.ndim == 4
    layout = torch.channels_last if job.channels_last and images else torch.contiguous_format
    shared = replace(batch, inputs=batch.inputs.contiguous(memory_format=layout), targets=batch.targets.contiguous())
    if part.size > 1:
        for tensor in (shared.inputs, shared.targets):
            dist.broadcast(dense(tensor), group=part.group, group_src=0)
    return shared


@contextmanager
def rank_random(part: Part, device: torch.device) -> Generator[None]:
    """Different random numbers on each rank, for units that only it has. The seed comes from the stream that the ranks
    share, so that a checkpointed block drops the same units when it runs again."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + part.rank)
        yield


def sum_type(dtype: torch.dtype, adds_bf16: bool) -> torch.dtype:
    """The type in which ranks add up tensors of this type."""
    return torch.float32 if dtype == torch.bfloat16 and not adds_bf16 else dtype


class _Collective(torch.autograd.Function):
    """One collective forward, another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ahead: Change, back: Change) -> Tensor:
        ctx.back = back
        return ahead(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return ctx.back(gradient), None, None


_collective = cast(Callable[[Tensor, Change, Change], Tensor], _Collective.apply)


def loss_of_parts(job: Job, part: Part, parallel: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The job's loss of logits of which each rank has some classes. parallel: without gathering them."""
    loss, classes = job.loss, job.model.outputs()
    if part.size > 1 and parallel:
        assert isinstance(loss, CrossEntropy)
        return lambda logits, targets: parallel_cross_entropy(logits, targets, classes, loss.label_smoothing, part)
    return lambda logits, targets: loss(full_logits(logits, job, part), targets)


def full_logits(logits: Tensor, job: Job, part: Part) -> Tensor:
    """[..., classes], of this rank's slice of them."""
    return gather_from(logits, -1, job.model.outputs(), part) if part.size > 1 else logits


def score_complete(
    output: Tensor, batch: Batch | None, score: Score, complete: Callable[[Tensor], Tensor], part: Part
) -> None:
    """Score outputs that `complete` gathers from all ranks, text sample by sample: the logits of all classes of several
    samples may be the largest tensor of a run. batch: the samples; None where this rank does not report"""
    count = len(output) if output.ndim == 3 and part.size > 1 else 1
    parts = repeat(None) if batch is None else micro_batches(batch, count)
    for slice_, samples in zip(output.chunk(count), parts, strict=False):
        if samples is None:
            complete(slice_)
        else:
            score(complete(slice_), samples)


def parallel_cross_entropy(logits: Tensor, targets: Tensor, classes: int, smoothing: float, part: Part) -> Tensor:
    """Mean nats a scored target, the same on every rank, of this rank's slice [..., classes / size] of the logits."""
    return cast(Tensor, _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), classes, smoothing, part))


class _CrossEntropy(torch.autograd.Function):
    """As recipe.recipe.CrossEntropy. With p = softmax(x), weight e of smoothing and C classes, a sample of class c has

    loss = log sum exp x - (1 - e) x_c - e mean x,   d loss / d x_i = p_i - (1 - e) [i = c] - e / C
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, classes: int, smoothing: float, part: Part) -> Tensor:
        first, count = part.span(classes)
        highest = logits.amax(-1, keepdim=True).float()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=part.group)
        shifted = logits.float() - highest
        target = targets - first
        elsewhere = (target < 0) | (target >= count)
        target = target.masked_fill(elsewhere, 0).unsqueeze(-1)
        hit = shifted.gather(-1, target).squeeze(-1).masked_fill(elsewhere, 0.0)
        mean = shifted.sum(-1) / classes if smoothing else torch.zeros_like(hit)
        shares = shifted.exp_()
        normalizer, hit, mean = total(torch.stack([shares.sum(-1), hit, mean]), part)
        shares /= normalizer.unsqueeze(-1)
        scored = targets != IGNORED
        nats = normalizer.log() - (1 - smoothing) * hit - smoothing * mean
        ctx.save_for_backward(shares, target, elsewhere, scored)
        ctx.constants = classes, smoothing, logits.dtype
        return nats.masked_fill(~scored, 0.0).sum() / scored.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, target, elsewhere, scored = ctx.saved_tensors
        classes, smoothing, dtype = ctx.constants
        slope = shares - smoothing / classes
        slope.scatter_add_(-1, target, elsewhere.to(slope.dtype).sub_(1).mul_(1 - smoothing).unsqueeze(-1))
        slope *= (gradients[0] * scored / scored.sum()).unsqueeze(-1)
        return slope.to(dtype), None, None, None, None
