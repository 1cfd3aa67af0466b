"""Layers whose rows ranks share, also where heights do not divide; that models train what one process trains is tested
in tests/equality/."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.spatial.layers import Window, rows_of, share_rows, windows
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.equality.cases import MODELS
from tests.support.equal import make_job, ready
from tests.support.jobs import ranks, refused
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case

RESNET = replace(cast(ResNet, MODELS["resnet"]), image_size=100)
VGG16 = VGG("vgg", channels=[4, 4, 8, 8, 8], hidden=32, image_size=76, num_classes=7, dropout=0.0)


@dataclass
class Layers:
    """Each kind of layer that is shared, at heights that do not divide."""

    height: int = 29
    name: str = "layers"
    kind: str = "images"
    more: tuple[nn.Module, ...] = ()

    def build(self) -> nn.Sequential:
        features = [
            nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), nn.BatchNorm2d(6),
            nn.Conv2d(6, 6, 1, stride=2), *deepcopy(self.more), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
        ]  # fmt: skip
        return nn.Sequential(OrderedDict((f"layer{number}", layer) for number, layer in enumerate(features)))

    def input_shape(self) -> tuple[int, ...]:
        return (3, self.height, 20)

    def outputs(self) -> int:
        return 5

    def tensor_plan(self) -> dict[str, str]:
        return {}


class SavedStatistics(TorchDispatchMode):
    """Fails where BatchNorm's backward pass lacks the saved statistics: CUDA's kernel for channels_last does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.native_batch_norm_backward.default or None not in args[5:7]
        return func(*args, **(kwargs or {}))


def passes(model: nn.Sequential, images: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of one step."""
    images = images.clone().requires_grad_()
    output = model(images)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert images.grad is not None
    return {"output": output.detach(), "images": images.grad, **gradients, **dict(model.named_buffers())}


def differences() -> list[float]:
    """The largest difference to complete images, for several heights. With channels last, some ranks need rows of
    others before the last layer, and some do not: they would gather rows of two memory formats."""
    rank, size, outcomes = dist.get_rank(), dist.get_world_size(), list[float]()
    cases = [(Layers(height), torch.contiguous_format) for height in range(29, 38)]
    cases += [(Layers(height, more=(nn.MaxPool2d(2),)), torch.channels_last) for height in range(58, 76, 2)]
    for model, layout in cases:
        torch.manual_seed(model.height)
        images = torch.randn(3, *model.input_shape()).contiguous(memory_format=layout)
        whole, shared = (cast(Any, model.build()).to(memory_format=layout) for _ in range(2))
        shared.load_state_dict(whole.state_dict())
        part = Part(dist.group.WORLD, rank, size)
        of_rows = {id(parameter) for parameter in share_rows(shared, windows(model), part)}
        span = part.span(model.height)
        expected = passes(whole, images)
        with SavedStatistics():
            got = passes(shared, rows_of(images, part))
        # Not only in proportion: fp16 would overflow earlier.
        expected["images"] = expected["images"].narrow(2, *span)
        for name, parameter in shared.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            got[name] = parameter.grad / (1 if id(parameter) in of_rows else size)
        outcomes += [(got[name] - tensor).abs().max().item() for name, tensor in expected.items()]
    return outcomes


def facts() -> dict[str, Any]:
    with ready(Spatial(), make_job(Case("resnet", RESNET, global_batch=8))) as (trainer, _):
        return trainer.facts() | {"place": trainer.place}


@cache
def outcomes(world: int) -> list[dict[str, Any]]:
    return run_ranks(world, results, {"differences": differences, "facts": facts})


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layer_equals_that_of_complete_images(world: int) -> None:
    assert max(max(each["differences"]) for each in outcomes(world)) < 1e-4


def test_facts_and_places() -> None:
    first, second = (each["facts"] for each in outcomes(2))
    assert {key: first[key] for key in ("dp", "sp", "reduce_dtype", "staleness")} == {
        "dp": 1, "sp": 2, "reduce_dtype": "fp32", "staleness": 0
    }  # fmt: skip
    assert [(each["place"].reads_data, each["place"].reports) for each in (first, second)] == [
        (True, True),
        (False,) * 2,
    ]
    assert second["place"].coordinates == {"dp": 0, "sp": 1}


def test_what_cannot_be_shared_is_refused() -> None:
    refused(Spatial(), ranks(8, RESNET), r"8 ranks cannot share the 4 rows of layer4_0\.conv2: choose framework\.sp=4")
    refused(Spatial(), ranks(4, VGG16), r"4 ranks cannot share the 2 rows of conv5_3\.pool: choose framework\.sp=2")
    refused(Spatial(), ranks(2, MODELS["gpt2"]), "gpt2 has no image to split: choose framework=tensor")
    refused(Spatial(), ranks(6, RESNET), r"6 ranks cannot share the 4 rows .* choose framework\.sp=3 framework\.dp=2")
    Spatial(dp=2, sp=4).check(ranks(8, RESNET))


@pytest.mark.parametrize("layer", [nn.AvgPool2d(3, padding=1), nn.Conv2d(6, 6, 3, padding="same"), nn.GroupNorm(1, 6)])
def test_layers_that_are_not_known_are_refused(layer: nn.Module) -> None:
    refused(Spatial(), ranks(2, Layers(more=(layer,))), "it is not known which rows layer7 needs")


WINDOWS = {"3x3": (3, 1, 1), "strided": (3, 2, 1), "1x1 strided": (1, 2, 0), "stem": (7, 2, 3), "halves": (2, 2, 0)}


@pytest.mark.parametrize("name", WINDOWS)
def test_lent_rows_are_what_the_windows_of_all_parts_reach(name: str) -> None:
    """Heights that divide and others, cut into 2 to 5 parts, compared with the rows of each window one by one."""
    kernel, stride, padding = WINDOWS[name]
    for height, size in product(range(14, 40), range(2, 6)):
        window = Window(height, kernel, stride, padding)
        parts = [Part(None, rank, size) for rank in range(size)]
        for user in parts:
            first, count = user.span(window.output)
            reached = {
                row
                for output in range(first, first + count)
                for row in range(output * stride - padding, output * stride - padding + kernel)
            }
            got: list[int] = []
            for owner in parts:
                begin, rows = owner.span(height)[0], window.shared(owner, owner.rank, user.rank)
                assert window.taken(user)[owner.rank] == rows.stop - rows.start <= owner.span(height)[1]
                got += range(begin + rows.start, begin + rows.stop)
            # With a stride windows may skip rows between two that they reach.
            every = range(max(0, min(reached)), min(height, max(reached) + 1))
            assert {row for row in reached if 0 <= row < height} <= set(every)
            assert got == [*every], (height, size)
