"""GPT-2's activation: the formula as eager kernels (transformers' gelu_new) beside torch's one kernel of the same
mathematics. Prints milliseconds of forward and backward, and bytes that autograd keeps.

    python benchmarks/activation.py [--samples 32] [--tokens 1024] [--width 3072]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers.activations import NewGELUActivation

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new, eager": NewGELUActivation(),
    "gelu(approximate='tanh')": partial(gelu, approximate="tanh"),
}


def kept_bytes(activation: Callable[[Tensor], Tensor], inputs: Tensor) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass, each storage counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = activation(inputs)
    del output
    return sum(storages.values())


def seconds(activation: Callable[[Tensor], Tensor], inputs: Tensor, repeats: int) -> float:
    """The fastest of `repeats` forward and backward passes, to an idle device."""
    best = float("inf")
    for _ in range(repeats + 2):  # the first ones warm up
        synchronize(inputs.device)
        start = time.perf_counter()
        activation(inputs).backward(torch.ones_like(inputs))
        synchronize(inputs.device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (given.samples, given.tokens, given.width)
    inputs = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    print(f"{shape} in bf16 on {torch.cuda.get_device_name() if device.type == 'cuda' else 'the CPU'}\n")
    print("| activation | forward and backward | kept for backward |\n|---|---|---|")
    for name, activation in ACTIVATIONS.items():
        time_ms = 1e3 * seconds(activation, inputs, given.repeats)
        print(f"| {name} | {time_ms:.3f} ms | {kept_bytes(activation, inputs) / 2**20:,.0f} MiB |")


if __name__ == "__main__":
    main()
