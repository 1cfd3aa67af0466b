"""What would make a run on a GPU faster, and what else it would change: said once at the start, and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddlbench.config.schema import Config
from ddlbench.data.loaders.cores import few_cores

TILE = 128  # rows of a matrix that tensor cores take at once, whatever their type


def advice(config: Config, device: torch.device, loader: Mapping[str, Any]) -> list[str]:
    """A line a setting; none for a CPU. loader: what the loader says of itself."""
    if device.type != "cuda":
        return []
    model = [*_arithmetic(config), *_vocabulary(config), *_layout(config)] if config.mode == "train" else []
    return [*model, *_cores(loader)]


def _cores(loader: Mapping[str, Any]) -> list[str]:
    if "cores" not in loader:  # loader=synthetic
        return []
    line = few_cores(loader["cores"], loader.get("workers", loader.get("threads", 0)))
    return [line] if line else []


def _arithmetic(config: Config) -> list[str]:
    if config.train.precision != "fp32" or config.train.tf32:
        return []
    return [
        "fp32 without TF32 does not use the tensor cores: train.tf32=true (10 bits of mantissa in matrix products and "
        "convolutions, from NVIDIA's Ampere on) and train.precision=bf16 (7 bits, over fp32 weights) are faster"
    ]


def _vocabulary(config: Config) -> list[str]:
    """Padding is not the default: the papers trained 50,257 tokens, and a model must not depend on its device."""
    rows = config.model.outputs()
    if config.model.kind != "text" or rows % TILE == 0:
        return []
    return [
        f"a vocabulary of {rows:,} does not fill tensor cores: model.pad_vocab_to_multiple={TILE} is faster; the "
        f"{-rows % TILE} tokens that it adds are never a target but part of the softmax, so losses differ a little"
    ]


def _layout(config: Config) -> list[str]:
    if config.model.kind != "images" or config.train.precision == "fp32" or config.train.channels_last:
        return []
    return [
        f"convolutions in {config.train.precision} are faster with train.channels_last=true: the same mathematics, but "
        "sums may run in another order"
    ]
