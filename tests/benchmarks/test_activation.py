"""benchmarks/activation.py: both activations are the same function, and what each keeps is counted right."""

from __future__ import annotations

import torch

from benchmarks.activation import ACTIVATIONS, kept_bytes, seconds


def test_one_kernel_keeps_its_input_only() -> None:
    inputs = torch.randn(4, 1024, dtype=torch.bfloat16, requires_grad=True)
    eager, fused = (kept_bytes(activation, inputs) for activation in ACTIVATIONS.values())
    assert fused == inputs.nbytes
    assert eager >= 4 * inputs.nbytes


def test_both_compute_the_same() -> None:
    inputs = torch.linspace(-6, 6, 1001, requires_grad=True)
    result = []
    for activation in ACTIVATIONS.values():
        output = activation(inputs)
        result.append((output, *torch.autograd.grad(output.sum(), inputs)))
        assert seconds(activation, inputs, repeats=1) > 0
    for eager, fused in zip(*result, strict=True):
        torch.testing.assert_close(eager, fused, atol=5e-6, rtol=1e-5)
