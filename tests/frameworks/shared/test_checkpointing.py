"""Blocks give the same results with and without activation checkpointing."""

from __future__ import annotations

import torch

from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks
from tests.support.jobs import job


def test_checkpointing_changes_nothing_but_memory() -> None:
    images = torch.randn(4, 3, 32, 32)
    plain, checkpointed = job().build(), job().build()
    checkpoint_blocks(checkpointed)
    for model in (plain, checkpointed):
        model(images).square().mean().backward()
    for (name, one), (other, two) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one.grad, two.grad)  # pyright: ignore
    # BatchNorm ran twice and must have counted once.
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(checkpointed.named_buffers())[name]), name
