"""Cross-entropy of logits of which each rank has some classes: nothing of the size of the logits is sent.

Shoeybi et al. 2019, "Megatron-LM", section 3. Label smoothing and unscored targets as in recipe/losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddlbench.frameworks.tensor.collectives import Part, gather_from, total
from ddlbench.job import Job
from ddlbench.recipe.losses import IGNORED, CrossEntropy


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


def parallel_cross_entropy(logits: Tensor, targets: Tensor, classes: int, smoothing: float, part: Part) -> Tensor:
    """Mean nats a scored target, the same on every rank, of this rank's slice [..., classes / size] of the logits."""
    return cast(Tensor, _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), classes, smoothing, part))


class _CrossEntropy(torch.autograd.Function):
    """With p = softmax(x), weight e of smoothing and C classes, a sample of class c has

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
