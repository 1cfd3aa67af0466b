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
from torch import Tensor, nn

from ddlbench.config.schema import Config
from ddlbench.data.feed import Request
from ddlbench.data.home import home
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.files import replacing
from ddlbench.job import Place, type_of_dtype
from ddlbench.oracle.measured.network import wait
from ddlbench.oracle.setting import kind_of
from ddlbench.oracle.timing.computation import Pass
from ddlbench.recipe.losses import CrossEntropy
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.texts import digest

REPEATS = 5


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
    """Seconds of every block, whose input is the output of the block before, and of the update."""
    if device.type == "cpu":
        torch.set_num_threads(config.train.threads_per_rank)
    torch.manual_seed(0)
    model = config.model.build().to(device)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model.to(memory_format=layout)
    batch = random_batch(Request(config.model, Place(0, 1), device, 0, samples), samples)
    value, targets = batch.inputs, batch.targets
    passes: list[Pass] = []
    *_, last = model.children()
    for block in model.children():
        took, value = _block(block, value, targets if block is last else None, config)
        passes.append(took)
    return passes, _update(config, model, device)


def _block(block: nn.Module, value: Tensor, targets: Tensor | None, config: Config) -> tuple[Pass, Tensor]:
    """The seconds of a block, and its output. targets: of the last block, whose passes include the loss"""
    device, precision = value.device, config.train.precision
    ahead, back = list[float](), list[float]()
    loss, output = CrossEntropy(config.recipe.label_smoothing), value
    for _ in range(REPEATS + 1):
        wait(device)
        began = time.perf_counter()
        with torch.autocast(device.type, type_of_dtype[precision], enabled=precision != "fp32"):
            output = block(value)
            result = output if targets is None else loss(output, targets)
        wait(device)
        half = time.perf_counter()
        result.backward(torch.ones_like(result))
        wait(device)
        ahead.append(half - began)
        back.append(time.perf_counter() - half)
        block.zero_grad()
        value = value.detach().requires_grad_(value.is_floating_point() and value.requires_grad)
    following = output.detach().requires_grad_(output.is_floating_point())
    return Pass(median(ahead[1:]), median(back[1:])), following


def _update(config: Config, model: nn.Module, device: torch.device) -> float:
    optimizer = make_optimizer(config.recipe.optimizer, model.named_parameters())
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        wait(device)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
