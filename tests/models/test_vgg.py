from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torchvision.models.vgg import make_layers

from ddlbench.errors import UserError
from ddlbench.models.vgg import VGG
from tests.support.originals import (
    assert_copies_train_alike,
    assert_same_bits,
    assert_trains_as,
    configured,
    from_original,
    parameters,
    to_original,
)

TINY = VGG("tiny", convs=[2, 1, 1, 1, 1], channels=[4, 6, 8, 8, 8], hidden=16, image_size=32, num_classes=10)


def original() -> torch.nn.Module:
    """torchvision's class around small layers: it fixes the classifier's sizes, so that smaller ones are put in."""
    with torch.device("meta"):
        features = make_layers([4, 4, "M", 6, "M", 8, "M", 8, "M", 8, "M"])
        network = torchvision.models.VGG(features, num_classes=10, init_weights=False)
        network.classifier[0] = torch.nn.Linear(8 * 7 * 7, 16)
        network.classifier[3] = torch.nn.Linear(16, 16)
        network.classifier[6] = torch.nn.Linear(16, 10)
    return network.to_empty(device="cpu")


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_the_original(precision: torch.dtype) -> None:
    theirs, ours = original(), TINY.build()
    theirs.load_state_dict(to_original(TINY, ours.state_dict()), strict=True)
    assert_trains_as(TINY, ours, theirs, precision)


def test_vgg16_from_a_seed_loads_into_the_original_and_back() -> None:
    model = configured("vgg16")
    torch.manual_seed(11)
    ours = model.build().state_dict()
    torch.manual_seed(11)
    theirs = torchvision.models.vgg16()
    assert_same_bits(to_original(model, ours), theirs.state_dict())
    theirs.load_state_dict(to_original(model, ours), strict=True)
    back = from_original(model, theirs.state_dict())
    assert list(back) == list(ours)
    assert_same_bits(back, ours)


def test_a_block_for_each_layer_with_weights() -> None:
    blocks = [name for name, _ in TINY.build().named_children()]
    assert blocks == ["conv1_1", "conv1_2", "conv2_1", "conv3_1", "conv4_1", "conv5_1", "fc6", "fc7", "fc8"]


def test_parameter_count() -> None:
    assert parameters(configured("vgg16")) == 138_357_544


def test_dropout_rate() -> None:
    network = VGG("tiny", channels=[2] * 5, hidden=4, dropout=0.25).build()
    assert [module.p for module in network.modules() if isinstance(module, torch.nn.Dropout)] == [0.25, 0.25]


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "compile"])
def test_copies_give_the_same_output_and_gradients(copier: str) -> None:
    assert_copies_train_alike(TINY, copier)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": 16}, r"model.image_size=16 must be 32 or more"),
        ({"convs": [1, 1]}, r"model.convs=\[1, 1\] must be 5 numbers"),
        ({"channels": [8, 8, 8, 8, 0]}, r"model.channels=\[8, 8, 8, 8, 0\] must be 5 numbers, each 1 or more"),
        ({"hidden": 0}, r"model.hidden=0 must be 1 or more"),
        ({"dropout": 1.0}, r"model.dropout=1.0 must be a rate from 0 to below 1"),
    ],
)
def test_impossible_sizes(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        VGG("bad", **sizes)
