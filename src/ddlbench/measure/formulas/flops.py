"""Floating-point operations of a model, and the share of a device's peak that they reach (MFU).

Model FLOPs are those of the mathematics: 2 for a multiply-accumulate of a matrix product or a convolution, no
recomputation, attention over the full square of positions (Chowdhery et al. 2022, "PaLM", appendix B). Hardware FLOPs
are those that are computed, with recomputation (Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ddlbench.errors import Unsupported
from ddlbench.job import Model, example_batch


class Peak(NamedTuple):
    """Dense peaks in TFLOP/s; None: the device has no such unit."""

    bf16: float | None
    fp16: float | None
    fp32: float | None


# By the device's name, as torch.cuda.get_device_name() gives it, which must match as a whole: a MIG slice or a part
# made for one site has other peaks. bf16, fp16: tensor or matrix cores, without structured sparsity.
# fp32 on NVIDIA: outside the tensor cores, as matmul computes by default (TF32 is off); on AMD: matrix cores.
PEAKS = {
    # NVIDIA P100 data sheet: no tensor cores
    r"Tesla P100-SXM2-16GB": Peak(None, 21.2, 10.6),
    r"Tesla P100-PCIE-16GB": Peak(None, 18.7, 9.3),
    # NVIDIA V100 data sheet (2020)
    r"Tesla V100-SXM2-(16|32)GB": Peak(None, 125, 15.7),
    r"Tesla V100-PCIE-(16|32)GB": Peak(None, 112, 14),
    r"Tesla V100S-PCIE-32GB": Peak(None, 130, 16.4),
    # NVIDIA T4 data sheet
    r"Tesla T4": Peak(None, 65, 8.1),
    # NVIDIA A100, A30, A40, A10 data sheets
    r"(NVIDIA )?A100-(SXM4?-[48]0GB|PCIE-40GB)|NVIDIA A100 80GB PCIe": Peak(312, 312, 19.5),
    r"NVIDIA A30": Peak(165, 165, 10.3),
    r"NVIDIA A40": Peak(149.7, 149.7, 37.4),
    r"NVIDIA A10": Peak(125, 125, 31.2),
    # NVIDIA GA102 white paper: tensor cores that add in fp32
    r"NVIDIA GeForce RTX 3090": Peak(71, 71, 35.6),
    # NVIDIA L4, L40, L40S data sheets
    r"NVIDIA L4": Peak(121, 121, 30.3),
    r"NVIDIA L40": Peak(181.05, 181.05, 90.5),
    r"NVIDIA L40S": Peak(362.05, 362.05, 91.6),
    # NVIDIA H100 architecture white paper; H100 NVL, H200, GH200 data sheets (same dies; half of the sparse figures)
    r"NVIDIA H100 80GB HBM3|NVIDIA H200|NVIDIA GH200 (480GB|120GB|144G HBM3e)": Peak(989.4, 989.4, 66.9),
    r"NVIDIA H100 PCIe": Peak(756, 756, 51.2),
    r"NVIDIA H(100|200) NVL": Peak(835.5, 835.5, 60),
    # NVIDIA Blackwell data sheet: a GPU of HGX B200, of GB200 NVL72
    r"NVIDIA B200": Peak(2250, 2250, 75),
    r"NVIDIA GB200": Peak(2500, 2500, 80),
    # AMD Instinct data sheets; an MI250X is two devices, each with half of the board's 383 and 95.7
    r"AMD Instinct MI210": Peak(181, 181, 45.3),
    r"AMD Instinct MI250X": Peak(191.5, 191.5, 47.85),
    r"AMD Instinct MI300A": Peak(980.6, 980.6, 122.6),
    r"AMD Instinct MI3(00|25)X": Peak(1307.4, 1307.4, 163.4),
}


SAMPLES = 2  # of a checkpointed model


def training_flops(model: Model, checkpoint: Callable[[nn.Sequential], None] | None = None) -> int:
    """Model FLOPs of one sample's forward and backward pass; the input needs no gradient.

    checkpoint: lets blocks run again in the backward pass. Then the result is the hardware FLOPs: those that are
        computed, counted on the blocks as it changes them, because torch ends a second run at the last tensor that is
        needed. Dropout keeps what comes before it, so the count needs training mode, and two samples because of
        BatchNorm
    """
    counter, _ = _count(model, backward=True, checkpoint=checkpoint)
    return counter.get_total_flops() // (SAMPLES if checkpoint else 1)


def forward_flops_per_block(model: Model) -> dict[str, int]:
    """Model FLOPs of one sample's forward pass in each named block."""
    counter, blocks = _count(model, backward=False)
    counts = counter.get_flop_counts()
    return {block: sum(counts.get(f"Sequential.{block}", {}).values()) for block in blocks}


def _count(
    model: Model, backward: bool, checkpoint: Callable[[nn.Sequential], None] | None = None
) -> tuple[FlopCounterMode, list[str]]:
    """FLOPs of one sample (of SAMPLES with `checkpoint`), and the names of the blocks. Fake tensors have shapes only:
    nothing is computed.

    SDPA's math kernel is made of matrix products, which the counter knows; of the fused kernels it knows only some.
    Evaluation mode: BatchNorm refuses to take statistics of one value a channel, and they count for nothing here.
    """
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network = model.build().train(checkpoint is not None)
        if checkpoint:
            checkpoint(network)
        output = network(example_batch(model, SAMPLES if checkpoint else 1).inputs)
        if backward:
            output.sum().backward()
    return counter, [name for name, _ in network.named_children()]


def operation_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of one operation below autograd, as torch's FlopCounterMode counts them. It lacks the CPU's attention:
    that is counted as on other devices. The backward pass of attention in one kernel computes the scores again: five
    products of [T, T] and [T, n_embd], where the mathematics has four."""
    packet, aten = func._overloadpacket, torch.ops.aten
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    formula = flop_registry.get(packet)
    return formula(*args, **(kwargs or {}), out_val=out) if formula else 0.0


def is_costly(func: Any) -> bool:
    """Whether `operation_flops` counts it forward: a matrix product, a convolution or an attention kernel."""
    packet = func._overloadpacket
    return packet in flop_registry or packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s, for precision bf16, fp16 or fp32; None where it is not known."""
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, gpu_name)), None)
    tflops = peak._asdict().get(precision) if peak else None
    return None if tflops is None else tflops * 1e12


def check_precision(precision: str, gpu_name: str, emulated: bool = False) -> None:
    """Unsupported for a precision that the GPU lacks, as bf16 on a V100: its peak in fp16 is known, and none in this
    precision. emulated: torch says that it would emulate it"""
    if emulated or (peak_flops(gpu_name, "fp16") is not None and peak_flops(gpu_name, precision) is None):
        raise Unsupported(f"{gpu_name} has no {precision}: set train.precision=fp16 or fp32")


def mfu(flops_per_s: float, gpu_name: str, precision: str) -> float | None:
    """Model FLOPs utilization: the share of one device's peak that its model FLOP/s reach; None for an unknown peak.
    With hardware FLOP/s it is the hardware FLOPs utilization."""
    peak = peak_flops(gpu_name, precision)
    return None if peak is None else flops_per_s / peak
