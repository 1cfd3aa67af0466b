"""Validation metrics as sums first: every rank adds up its own batches, the sums of all ranks are added, and means
are taken only then. So no layout and no padding changes a metric.

The sums are one float64 vector: nats of negative log likelihood, scored targets, top-1 hits, top-5 hits, samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddlbench.job import Batch
from ddlbench.recipe.recipe import IGNORED


def empty_sums(device: torch.device) -> Tensor:
    """The sums before the first batch: [5] float64."""
    return torch.zeros(5, dtype=torch.float64, device=device)


def batch_sums(output: Tensor, batch: Batch) -> Tensor:
    """Sums over the valid samples of one batch, on the output's device, without waiting for it: [5] float64.

    output: scores of the classes [B, C], or of the next token [B, T, V]; hits are counted for classes only
    The likelihood is the plain one, without the label smoothing of training, in float32 for every type of output.
    """
    images = output.ndim == 2
    valid = batch.valid if images else batch.valid[:, None]
    targets = torch.where(valid, batch.targets, IGNORED)
    # Text goes sample by sample: a float32 copy of the whole batch's scores would be the largest tensor of the run.
    parts = [(output, targets)] if images else zip(output, targets, strict=True)
    losses = (F.cross_entropy(s.float(), t, ignore_index=IGNORED, reduction="none") for s, t in parts)
    nats = torch.stack([loss.sum(dtype=torch.float64) for loss in losses]).sum()
    # Whether the target is the best score, ..., the fifth best (all, of fewer classes).
    best = min(5, output.shape[-1])
    hit = output.topk(best).indices == targets[:, None] if images else valid.new_zeros(1, 1)
    masks = targets != IGNORED, hit[:, 0], hit, batch.valid
    return torch.stack([nats, *(mask.sum(dtype=torch.float64) for mask in masks)])


def finish(sums: Tensor, kind: str, words: int | None) -> dict[str, float | None]:
    """Metrics of all ranks' sums, named as the table's columns; None for what does not follow from the sums, and no
    hits where the likelihood is not finite: the best of scores that are no numbers is no prediction.

    kind: "images" | "text"
    words: words of the original text behind the scored tokens, None where not known
    """
    nats, scored, top1, top5, samples = sums.tolist()
    loss, top1, top5 = (sum_ / scored if scored else None for sum_ in (nats, top1, top5))
    metrics: dict[str, float | None] = {"val_loss": loss, "val_samples": int(samples)}
    if not math.isfinite(nats):
        return metrics
    if kind == "images":
        return {**metrics, "val_top1": top1, "val_top5": top5}
    perplexities = {"val_perplexity_token": perplexity(nats, scored), "val_perplexity_word": perplexity(nats, words)}
    return metrics | perplexities


def without_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that mean something on random samples: their number, and a loss that is not finite, because that is a
    failure on any samples."""
    diverged = not math.isfinite(metrics.get("val_loss") or 0.0)
    return {
        name: value for name, value in metrics.items() if name == "val_samples" or (name == "val_loss" and diverged)
    }


def perplexity(nats: float, pieces: float | None) -> float | None:
    """exp(nats per token or word); None where nothing was counted, or beyond a float's range (val_loss is kept)."""
    try:
        return math.exp(nats / pieces) if pieces else None
    except OverflowError:
        return None
