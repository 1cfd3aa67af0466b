from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddlbench.job import Model
from ddlbench.measure.formulas.flops import forward_flops_per_block, mfu, peak_flops, training_flops
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.support.jobs import checkpoint_all
from tests.support.originals import configured

TINY = GPT2("tiny", n_layer=1, n_embd=8, n_head=2, vocab_size=11, seq_len=4)
VGG5 = VGG("tiny", convs=[1] * 5, channels=[2] * 5, hidden=3, image_size=32, num_classes=5)


def forward_flops(model: Model) -> int:
    return sum(forward_flops_per_block(model).values())


@pytest.mark.parametrize(
    ("name", "forward"), [("resnet50", 8_178_368_512), ("vgg16", 30_940_528_640), ("gpt2_small", 291_648_307_200)]
)
def test_forward_of_the_full_models(name: str, forward: int) -> None:
    assert forward_flops(configured(name)) == forward


def test_training_leaves_out_the_gradient_of_the_images() -> None:
    stem = 2 * 112 * 112 * 64 * 3 * 7 * 7
    assert training_flops(configured("resnet50")) == 24_299_077_632 == 3 * 8_178_368_512 - stem


def test_a_transformer_by_hand() -> None:
    projections = 2 * 4 * 8 * (3 * 8 + 8 + 4 * 8 + 4 * 8)  # tokens x width x (qkv, output, MLP up and down)
    attention = 2 * 2 * 4 * 4 * 8  # scores and weighted values over the full square
    head = 2 * 4 * 8 * 11
    assert forward_flops_per_block(TINY) == {"embed": 0, "h0": projections + attention, "ln_f": 0, "head": head}
    assert training_flops(TINY) == 3 * (projections + attention + head)


def test_a_convolutional_net_by_hand() -> None:
    pixels = [32**2, 16**2, 8**2, 4**2, 2**2]
    channels_in = [3, 2, 2, 2, 2]
    convs = {f"conv{i + 1}_1": 2 * pixels[i] * 9 * channels_in[i] * 2 for i in range(5)}
    assert forward_flops_per_block(VGG5) == convs | {"fc6": 2 * 98 * 3, "fc7": 2 * 3 * 3, "fc8": 2 * 3 * 5}


def test_what_checkpointed_blocks_compute_again_is_counted() -> None:
    """A block runs again up to the last tensor that its backward pass needs. The output of a matrix product is none."""
    down, head = 2 * 4 * 4 * 8 * 8, 2 * 4 * 8 * 11
    again = forward_flops(TINY) - head  # dropout after the block's last product keeps a mask
    assert training_flops(TINY, checkpoint_all) == training_flops(TINY) + again
    assert training_flops(replace(TINY, dropout=0.0), checkpoint_all) == training_flops(TINY) + again - down
    net = ResNet("tiny", layers=[1, 1, 1, 1], width_per_group=8, image_size=32, num_classes=5)
    classifier = 2 * 2048 * 5
    assert training_flops(net, checkpoint_all) == training_flops(net) + forward_flops(net) - classifier


def test_counting_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    training_flops(TINY)
    training_flops(TINY, checkpoint_all)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.isfinite(TINY.build()(torch.zeros(1, 4, dtype=torch.int64))).all()


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # no such unit
        ("AMD Instinct MI250X", "bf16", 191.5e12),  # half of the board: one device
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),  # a slice
        ("NVIDIA A100-SXM-64GB", "bf16", None),  # made for one site, with more units
        ("NVIDIA H200", "int8", None),
        ("NVIDIA H200", "count", None),
        ("llvmpipe", "fp32", None),
    ],
)
def test_peak(gpu: str, precision: str, peak: float | None) -> None:
    assert peak_flops(gpu, precision) == peak


def test_mfu_is_a_share_of_the_peak_or_unknown() -> None:
    assert mfu(78e12, "NVIDIA A100-SXM4-80GB", "bf16") == 0.25
    assert mfu(78e12, "some other device", "bf16") is None
