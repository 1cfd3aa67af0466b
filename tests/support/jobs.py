"""A small job for tests that train nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddlbench.config.compose import counted_links
from ddlbench.errors import RunError, Unsupported, UserError
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks
from ddlbench.job import Batch, Framework, Job, Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.recipe.recipe import CrossEntropy
from tests.support.reference import Case

CPU = torch.device("cpu")
MODEL = ResNet(name="resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=32, num_classes=5)
CASE = Case("gpt2", GPT2("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0), lr=0.02)


def checkpoint_all(model: nn.Sequential) -> None:
    """Every block a segment of its own."""
    checkpoint_blocks(model, [[name] for name, _ in model.named_children()])


def job(precision: str = "fp32", clip_norm: float | None = None) -> Job:
    return Job(
        model=MODEL, loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1), device=CPU, rank=0,
        local_rank=0, world_size=1, seed=0, global_batch=4, micro_batch=2, precision=precision, clip_norm=clip_norm,
        links=counted_links,
    )  # fmt: skip


def two_ranks(**changes: object) -> Job:
    return replace(job(), world_size=2, micro_batch=None, **changes)  # pyright: ignore


def ranks(world: int, model: Model = CASE.model, **changes: Any) -> Job:
    """With one sample for each rank."""
    given = replace(job(), world_size=world, model=model, loss=CrossEntropy(0.0), micro_batch=None, global_batch=world)
    return replace(given, **changes)


def batch(samples: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator)
    return Batch(inputs, targets, torch.ones(samples, dtype=torch.bool))


def refused(framework: Framework, given: Job, reason: str, error: type[RunError] = Unsupported) -> None:
    """The framework does not train this job. reason: a regular expression"""
    with pytest.raises(error, match=reason):
        framework.check(given)


def wrong_knob(framework: Callable[..., Framework], reason: str, **knobs: Any) -> None:
    """No framework is made of these knobs."""
    with pytest.raises(UserError, match=reason):
        framework(**knobs)
