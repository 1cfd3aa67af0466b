from __future__ import annotations

import pytest
import torch
import torchvision
from torchvision.models.resnet import Bottleneck

from ddlbench.errors import UserError
from ddlbench.models.resnet import ResNet
from tests.support.originals import (
    assert_copies_train_alike,
    assert_same_bits,
    assert_trains_as,
    configured,
    from_original,
    parameters,
    to_original,
)

TINY = ResNet("tiny", layers=[2, 1, 1, 1], width_per_group=8, image_size=32, num_classes=10)


def original() -> torch.nn.Module:
    return torchvision.models.ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10, width_per_group=8)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_outputs_gradients_and_statistics_equal_the_original(precision: torch.dtype) -> None:
    theirs, ours = original(), TINY.build()
    ours.load_state_dict(from_original(TINY, theirs.state_dict()))
    assert_trains_as(TINY, ours, theirs, precision)


def test_a_seed_gives_the_original_weights() -> None:
    torch.manual_seed(11)
    ours = TINY.build()
    torch.manual_seed(11)
    assert_same_bits(to_original(TINY, ours.state_dict()), original().state_dict())


def test_state_loads_into_resnet50_and_back() -> None:
    model = configured("resnet50")
    ours, theirs = model.build(), torchvision.models.resnet50()
    theirs.load_state_dict(to_original(model, ours.state_dict()), strict=True)
    back = from_original(model, theirs.state_dict())
    assert list(back) == list(ours.state_dict())
    assert_same_bits(back, ours.state_dict())


def test_blocks_in_order() -> None:
    blocks = [name for name, _ in TINY.build().named_children()]
    assert blocks == ["stem", "layer1_0", "layer1_1", "layer2_0", "layer3_0", "layer4_0", "head"]


@pytest.mark.parametrize(
    ("name", "count"), [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808)]
)
def test_parameter_count(name: str, count: int) -> None:
    assert parameters(configured(name)) == count


def test_width_per_group_is_torchvisions() -> None:
    """wide_resnet50_2 of torchvision's model table."""
    assert parameters(ResNet("wide", layers=[3, 4, 6, 3], width_per_group=128)) == 68_883_240


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "compile"])
def test_copies_give_the_same_output_and_gradients(copier: str) -> None:
    assert_copies_train_alike(TINY, copier)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": 31}, r"model.image_size=31 must be 32 or more"),
        ({"layers": [1, 1, 1]}, r"model.layers=\[1, 1, 1\] must be 4 numbers"),
        ({"layers": [1, 0, 1, 1]}, r"model.layers=\[1, 0, 1, 1\] must be 4 numbers, each 1 or more"),
        ({"width_per_group": 0}, r"model.width_per_group=0 must be 1 or more"),
        ({"num_classes": 0}, r"model.num_classes=0 must be 1 or more"),
    ],
)
def test_impossible_sizes(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ResNet("bad", **{"layers": [1, 1, 1, 1], **sizes})
