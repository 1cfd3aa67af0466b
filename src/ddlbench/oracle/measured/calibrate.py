"""--calibrate: seconds of each block's forward and backward pass and of the update, measured on this machine's device.

Measured once for each device, model, micro batch, precision, optimizer and version of torch, and stored in
$DDLBENCH_HOME/oracle. The median of the repeats counts.
"""

from __future__ import annotations

import json
import platform
import time
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from torch import nn

from ddlbench.config.schema import Config
from ddlbench.data.feed import Request
from ddlbench.data.home import home
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.files import replacing
from ddlbench.job import Place
from ddlbench.measure.block_seconds import REPEATS, block_seconds
from ddlbench.measure.clock import idle
from ddlbench.oracle.setting import kind_of
from ddlbench.oracle.timing.computation import Pass
from ddlbench.recipe.losses import CrossEntropy
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.texts import digest


def calibration(config: Config, device: torch.device, samples: int) -> tuple[tuple[Pass, ...], float]:
    """Passes of the blocks, and seconds of the update; from the file of an earlier calibration if there is one."""
    train = config.train
    key = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu of {platform.node()}",
        "model": repr(config.model),
        "samples": samples,
        "precision": train.precision,
        "tf32": train.tf32,
        "channels_last": train.channels_last,
        "threads": train.threads_per_rank,
        "optimizer": kind_of(config.recipe.optimizer),
        "torch": str(torch.__version__),
    }
    path = home() / "oracle" / f"blocks-{digest(key, 16)}.json"
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(path.read_text()))
    if kept.get("key") != key:
        passes, update_s = measure(config, device, samples)
        kept = {"key": key, "passes": [[seconds.forward, seconds.backward] for seconds in passes], "update_s": update_s}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(kept, indent=1).encode())
    return tuple(Pass(*seconds) for seconds in kept["passes"]), kept["update_s"]


def measure(config: Config, device: torch.device, samples: int) -> tuple[list[Pass], float]:
    """Seconds of every block and of the update."""
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads_per_rank)
    torch.manual_seed(0)
    model = config.model.build().to(device)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(memory_format=layout)
    batch = random_batch(Request(config.model, Place(0, 1), device, 0, samples), samples)
    passes = block_seconds(model, batch, CrossEntropy(config.recipe.label_smoothing), config.train.precision)
    return [Pass(*seconds) for seconds in passes], _update(config, model, device)


def _update(config: Config, model: nn.Module, device: torch.device) -> float:
    optimizer = make_optimizer(config.recipe.optimizer, model.named_parameters())
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        idle(device)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        idle(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
