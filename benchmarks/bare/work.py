"""The work of one comparison: a model, one batch that stays, and the clock around a step.

The command line of every script: resnet50|gpt2_small BATCH_PER_RANK STEPS IMAGE_SIZE|SEQ_LEN
"""

import gc
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

name, batch, steps, size = sys.argv[1], *map(int, sys.argv[2:5])
first = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0"
torch.set_num_threads(1)
torch.manual_seed(0)


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=1000)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": size}
    return GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu_pytorch_tanh"))


def build() -> nn.Module:
    return resnet() if name == "resnet50" else gpt2()


def samples(count: int = batch) -> tuple[Tensor, Tensor]:
    if name == "resnet50":
        return torch.randn(count, 3, size, size), torch.randint(1000, (count,))
    return torch.randint(8192, (count, size)), torch.randint(8192, (count, size))


def make_optimizer(model: nn.Module) -> Optimizer:
    if name == "resnet50":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    output = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def timed(step: Callable[[], object]) -> None:
    began, times = time.perf_counter(), []
    for index in range(steps):
        step()
        now = time.perf_counter()
        times.append(now - began)
        began = now
        if index == 4 and first:  # warm: tell how long a step takes
            print("ready", min(times), flush=True)
    if first:
        print("steps", *times)


def leave() -> None:
    """Once nobody holds the model any more: a live one can abort a rank at its exit."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
