"""Every family: a seed gives the original's weights, equal weights train alike, states and copies lose nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import make_layers

from ddlbench.errors import UserError
from ddlbench.job import Model
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.models.originals import TINY, UNTIED, transformers_gpt2
from tests.support.originals import (
    PARAMETERS,
    assert_copies_train_alike,
    assert_same_bits,
    assert_trains_as,
    configured,
    from_original,
    parameters,
    to_original,
)

RESNET = ResNet("resnet", layers=[2, 1, 1, 1], width_per_group=8, image_size=32, num_classes=10)
VGG16 = VGG("vgg", convs=[2, 1, 1, 1, 1], channels=[4, 6, 8, 8, 8], hidden=16, image_size=32, num_classes=10)
SMALL: dict[str, Model] = {"gpt2": TINY, "untied gpt2": UNTIED, "resnet": RESNET, "vgg": VGG16}


def small_vgg() -> nn.Module:
    """torchvision's class around small layers: it fixes the classifier's sizes, so that smaller ones are put in."""
    with torch.device("meta"):
        features = make_layers([4, 4, "M", 6, "M", 8, "M", 8, "M", 8, "M"])
        network = torchvision.models.VGG(features, num_classes=10, init_weights=False)
        network.classifier[0] = nn.Linear(8 * 7 * 7, 16)
        network.classifier[3] = nn.Linear(16, 16)
        network.classifier[6] = nn.Linear(16, 10)
    return network.to_empty(device="cpu")


ORIGINALS: dict[str, Any] = {
    "gpt2": transformers_gpt2,
    "untied gpt2": lambda: transformers_gpt2(tied=False),
    "resnet": lambda: torchvision.models.ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10, width_per_group=8),
    "vgg": small_vgg,
    "resnet50": torchvision.models.resnet50,
    "vgg16": torchvision.models.vgg16,
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_outputs_gradients_and_statistics_equal_the_original(name: str, precision: torch.dtype) -> None:
    model, theirs = SMALL[name], ORIGINALS[name]()
    ours = model.build().train()
    theirs.load_state_dict(to_original(model, ours.state_dict()), strict=True)
    assert_trains_as(model, ours, theirs, precision)


@pytest.mark.parametrize("name", ["gpt2", "untied gpt2", "resnet", "resnet50", "vgg16"])
def test_a_seed_gives_the_original_weights_which_load_into_it_and_back(name: str) -> None:
    model = SMALL.get(name) or configured(name)
    torch.manual_seed(11)
    ours = model.build().state_dict()
    torch.manual_seed(11)
    theirs = ORIGINALS[name]()
    assert_same_bits(to_original(model, ours), theirs.state_dict())
    theirs.load_state_dict(to_original(model, ours), strict=True)
    back = from_original(model, theirs.state_dict())
    assert list(back) == list(ours)
    assert_same_bits(back, ours)


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "compile"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "vgg"])
def test_copies_give_the_same_output_and_gradients(name: str, copier: str) -> None:
    assert_copies_train_alike(replace(TINY, dropout=0.0) if name == "gpt2" else SMALL[name], copier)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (TINY, ["embed", "h0", "h1", "ln_f", "head"]),
        (RESNET, ["stem", "layer1_0", "layer1_1", "layer2_0", "layer3_0", "layer4_0", "head"]),
        (VGG16, ["conv1_1", "conv1_2", "conv2_1", "conv3_1", "conv4_1", "conv5_1", "fc6", "fc7", "fc8"]),
    ],
)
def test_blocks_in_order(model: Model, blocks: list[str]) -> None:
    assert [name for name, _ in model.build().named_children()] == blocks


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert parameters(configured(name)) == PARAMETERS[name]


def test_width_per_group_is_torchvisions() -> None:
    """wide_resnet50_2 of torchvision's model table."""
    assert parameters(ResNet("wide", layers=[3, 4, 6, 3], width_per_group=128)) == 68_883_240


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # The embeddings, and in each of two blocks attention weights, attention output and MLP.
        (TINY, 7),
        (VGG16, 2),
    ],
)
def test_dropout_is_one_rate_for_all(model: Any, count: int) -> None:
    network = replace(model, dropout=0.3).build()
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.3] * count


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (TINY, {"n_embd": 30}, r"n_embd=30 is not divisible by model.n_head=4 .*: choose model.n_embd=28 or 32"),
        (TINY, {"n_embd": 3}, r"n_embd=3 is not divisible by model.n_head=4 .*: choose model.n_embd=4$"),
        (TINY, {"n_layer": 0}, r"n_layer=0 must be 1 or more"),
        (TINY, {"seq_len": 0}, r"seq_len=0 must be 1 or more"),
        (TINY, {"pad_vocab_to_multiple": 0}, r"pad_vocab_to_multiple=0 must be 1 or more"),
        (TINY, {"dropout": -0.1}, r"dropout=-0.1 must be a rate from 0 to below 1"),
        (RESNET, {"image_size": 31}, r"image_size=31 must be 32 or more"),
        (RESNET, {"layers": [1, 1, 1]}, r"layers=\[1, 1, 1\] must be 4 numbers"),
        (RESNET, {"layers": [1, 0, 1, 1]}, r"layers=\[1, 0, 1, 1\] must be 4 numbers, each 1 or more"),
        (RESNET, {"width_per_group": 0}, r"width_per_group=0 must be 1 or more"),
        (RESNET, {"num_classes": 0}, r"num_classes=0 must be 1 or more"),
        (VGG16, {"image_size": 16}, r"image_size=16 must be 32 or more"),
        (VGG16, {"convs": [1, 1]}, r"convs=\[1, 1\] must be 5 numbers"),
        (VGG16, {"channels": [8, 8, 8, 8, 0]}, r"channels=\[8, 8, 8, 8, 0\] must be 5 numbers, each 1 or more"),
        (VGG16, {"hidden": 0}, r"hidden=0 must be 1 or more"),
        (VGG16, {"dropout": 1.0}, r"dropout=1.0 must be a rate from 0 to below 1"),
    ],
)
def test_impossible_sizes(model: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.{message}"):
        replace(model, **sizes)
