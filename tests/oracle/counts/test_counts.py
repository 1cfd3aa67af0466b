from __future__ import annotations

import pytest
import torch

from ddlbench.measure.formulas.flops import forward_flops_per_block, training_flops
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from ddlbench.oracle.counts.counting import count

MODELS = [
    ResNet("resnet50", [1, 1, 1, 1], width_per_group=16, image_size=64, num_classes=10),
    VGG("vgg16", channels=[8, 8, 16, 16, 16], hidden=32, dropout=0.0, image_size=64, num_classes=10),
    GPT2("gpt2_small", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=16, dropout=0.0),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_flops_and_parameters_are_those_of_the_model(model) -> None:
    counts = count(model, "fp32", "cpu")
    assert {block.name: block.flops for block in counts.blocks} == forward_flops_per_block(model)
    assert counts.numbers == sum(parameter.numel() for parameter in model.build().parameters())


@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.name)
def test_training_flops_of_images(model) -> None:
    counts = count(model, "fp32", "cpu")
    assert sum(block.flops + block.backward.flops.sum() for block in counts.blocks) == training_flops(model)


def test_fused_attention_computes_its_products_again() -> None:
    """Backward of attention: 5 matrix products of which one is a recomputation; 2 B H T T D each."""
    model = MODELS[2]
    counts = count(model, "fp32", "cuda")
    total = sum(block.flops + block.backward.flops.sum() for block in counts.blocks)
    assert total == training_flops(model) + 2 * (2 * 16 * 16 * 32)


def test_bytes_kept_are_what_autograd_keeps() -> None:
    """Beside the real model with 3 samples, whose storages are counted as it runs."""
    model = MODELS[1]
    counts = count(model, "fp32", "cpu")
    kept: dict[int, int] = {}
    real = model.build()
    own = {parameter.untyped_storage().data_ptr() for parameter in real.parameters()}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = real(torch.zeros(3, 3, 64, 64))
        torch.nn.functional.cross_entropy(output, torch.zeros(3, dtype=torch.int64)).backward()
    predicted = sum(block.kept.at(3) for block in counts.blocks)
    assert predicted == pytest.approx(sum(kept.values()), rel=0.01)


def test_an_input_ends_with_its_last_use() -> None:
    """conv1_2 over two ranks, 3 samples of 8 channels of 64 x 64, X bytes. When the convolution has used its input, the
    gradient of it is summed over ranks into a copy: 2 X, of which X is free again. So the convolution itself is the
    fullest moment: X for that gradient and X / 2 for the one of its own output."""
    block = count(MODELS[1], "fp32", "cpu", tp=2).blocks[1]
    own = 4 * (4 * 8 * 9 + 4)  # gradients of its weights
    whole = 3 * 8 * 64 * 64 * 4
    assert block.entering * 3 == whole
    assert block.back.most(3) == pytest.approx(2 * whole + own, rel=1e-4)
    assert block.freeing.most(3) == pytest.approx(1.5 * whole + own, rel=1e-4)


def test_bytes_of_a_linear_layer_by_hand() -> None:
    """fc8: 32 inputs, 10 outputs, one sample: reads 32 + 320 + 10 numbers, writes 10. The weights do not grow with the
    batch."""
    last = count(MODELS[1], "fp32", "cpu").blocks[-1]
    assert last.forward.fixed[0] + 0 == 4 * (320 + 10)
    assert last.forward.each[0] == 4 * (32 + 10)
    assert last.leaving == 40


def test_mixed_precision_moves_less_and_keeps_cast_weights() -> None:
    whole, half = (count(MODELS[0], precision, "cuda") for precision in ("fp32", "bf16"))
    assert sum(b.kept.each for b in half.blocks) < 0.6 * sum(b.kept.each for b in whole.blocks)
    assert sum(b.kept.fixed for b in half.blocks) > 2 * half.numbers * 0.9  # 2 bytes a weight


def test_a_tied_head_counts_once() -> None:
    counts = count(MODELS[2], "fp32", "cpu")
    assert counts.tied == 64 * 32
    assert counts.blocks[-1].numbers == 0


def test_halos_are_the_rows_beyond_a_window() -> None:
    """A 3x3 convolution of stride 1 reaches over two rows, pooling by halves over none."""
    rows = {each.name: each for block in count(MODELS[1], "fp32", "cpu").blocks for each in block.rows}
    assert (rows["conv1_1.conv"].halo, rows["conv1_1.conv"].height) == (2, 64)
    assert rows["conv1_1.conv"].row == 3 * 64 * 4
    assert (rows["conv1_2.pool"].halo, rows["conv5_1.conv"].height) == (0, 4)
