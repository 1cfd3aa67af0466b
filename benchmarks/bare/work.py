"""The work of one comparison: a model, one batch that stays, and the clock around a step.

The command line of every script: resnet50|gpt2_small BATCH_PER_RANK IMAGE_SIZE|SEQ_LEN [SETTING=VALUE ...]
By default every setting is as in ddlbench; its other value is the default of the library.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddlbench.measure.devices.memory import keep_freed_memory

SETTINGS = {
    "heap": ("kept", "freed"),  # whether the C library keeps freed memory (ADR 6)
    "cache": ("off", "on"),  # GPT-2's cache of keys and values, which only generation of text needs
    "activation": ("fused", "eager"),  # GPT-2's activation: one kernel, or one kernel for each operation of its formula
    "buffers": ("local", "broadcast"),  # DDP: running statistics of BatchNorm sent from rank 0 before each step
    "buckets": ("views", "copies"),  # DDP: gradients as views of the buckets that are reduced
}
LR = 1e-9
name, batch, size = sys.argv[1], *map(int, sys.argv[2:4])
settings = {key: values[0] for key, values in SETTINGS.items()} | dict(word.split("=") for word in sys.argv[4:])
first = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0"
torch.set_num_threads(1)  # ddlbench's train.threads_per_rank
torch.manual_seed(0)


def chosen(setting: str) -> bool:
    """Whether the setting is as in ddlbench."""
    return SETTINGS[setting].index(settings[setting]) == 0


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=1000)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": size}
    activation = "gelu_pytorch_tanh" if chosen("activation") else "gelu_new"
    return GPT2LMHeadModel(GPT2Config(**sizes, activation_function=activation, use_cache=not chosen("cache")))


def build() -> nn.Module:
    return resnet() if name == "resnet50" else gpt2()


def samples(count: int = batch) -> tuple[Tensor, Tensor]:
    if name == "resnet50":
        return torch.randn(count, 3, size, size), torch.randint(1000, (count,))
    return torch.randint(8192, (count, size)), torch.randint(8192, (count, size))


def make_optimizer(model: nn.Module) -> Optimizer:
    """With this learning rate neither side learns its one batch: gradients near zero may be denormal numbers, which are
    slow. Norms and biases do not decay, as in ddlbench's recipes: ZeRO gathers each group of parameters by itself."""
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    groups = [
        {"params": decayed},
        {"params": [weight for weight in model.parameters() if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "resnet50":
        return torch.optim.SGD(groups, lr=LR, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.1)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    output = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def timed(step: Callable[[], object]) -> None:
    """Step after step, without end; rank 0 prints at what time each ended. The driver ends the program."""
    if chosen("heap"):
        assert keep_freed_memory(), "the heap is not kept: unset MALLOC_* and GLIBC_TUNABLES"
    while True:
        step()
        if first:
            print(time.monotonic(), flush=True)
