"""Ranks that share the rows of images train what one process trains, also where heights do not divide."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlbench.errors import UserError
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.spatial.layers import Halo, Window, share_rows, windows
from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.job import Job
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG
from tests.equality.cases import MODELS
from tests.equality.distances import TOLERANCES, assert_equal, distance
from tests.support.changed_job import ChangedJob
from tests.support.equal import assert_reloaded, make_job, ready, reload, train_cases
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case, Outcome, reference

# 100 rows, then 50, 25, 13, 7 and 4: most cannot be divided. VGG drops the last of an odd number of rows.
RESNET = ResNet("resnet", layers=[1, 1, 1, 1], width_per_group=8, image_size=100, num_classes=7)
VGG16 = VGG("vgg", channels=[4, 4, 8, 8, 8], hidden=32, image_size=76, num_classes=7, dropout=0.0)
SMALL = Case("resnet", RESNET, lr=1e-5, seed=6, global_batch=8, steps=3)
PLAIN = replace(SMALL, name="vgg", model=VGG16, lr=0.02, seed=3)
HIGH = replace(PLAIN, model=replace(VGG16, image_size=140))  # 4 rows at the end
KNOBS: dict[str, Any] = {"micro_batch": 2, "clip_norm": 0.5, "checkpoint_activations": True}


@dataclass
class ChangedSpatial(ChangedJob, Spatial): ...


@dataclass
class WithoutHalo(Spatial):
    """Gradients of the rows of others are not given back."""

    def setup(self, job: Job) -> Any:
        trainer = super().setup(job)
        step = trainer.step

        def own_only(halo: Halo, gradient: Tensor, x: Tensor) -> Tensor:
            _, *pieces, _ = gradient.split([halo.above, *halo.taken, halo.below], 2)
            result = torch.zeros_like(x)
            result[:, :, halo.lent[halo.part.rank]] = pieces[halo.part.rank]
            return result

        def patched(batch: Any) -> Any:
            with patch.object(Halo, "give_back", own_only):
                return step(batch)

        trainer.step = patched
        return trainer


# By ranks: the case, the framework, and how many replicas there are.
TRAININGS: dict[int, dict[str, tuple[Case, Spatial, int]]] = {
    2: {
        "vgg": (PLAIN, Spatial(), 1),
        "resnet-knobs": (replace(SMALL, **KNOBS), Spatial(), 1),
        "resnet-channels-last": (SMALL, ChangedSpatial(changes={"channels_last": True}), 1),
        "resnet-replicas": (SMALL, Spatial(dp=2), 2),
        "vgg-bf16": (replace(PLAIN, precision="bf16"), Spatial(), 1),
    },
    4: {
        "resnet": (SMALL, Spatial(), 1),
        "resnet-2x2": (SMALL, Spatial(dp=2), 2),
        "vgg": (HIGH, Spatial(), 1),
        "vgg-2x2-knobs": (replace(PLAIN, **KNOBS), Spatial(dp=2), 2),
    },
}


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
            nn.Conv2d(6, 6, 1, stride=2), *self.more, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
        ]  # fmt: skip
        return nn.Sequential(OrderedDict((f"layer{number}", layer) for number, layer in enumerate(features)))

    def input_shape(self) -> tuple[int, ...]:
        return (3, self.height, 20)

    def outputs(self) -> int:
        return 5

    def tensor_plan(self) -> dict[str, str]:
        return {}


def passes(model: nn.Sequential, images: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of one step."""
    output = model(images)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), **gradients, **dict(model.named_buffers())}


def differences() -> list[float]:
    """The largest difference to complete images, for several heights."""
    rank, size, outcomes = dist.get_rank(), dist.get_world_size(), list[float]()
    for height in range(29, 38):
        torch.manual_seed(height)
        model = Layers(height)
        images, whole, shared = torch.randn(3, *model.input_shape()), model.build(), model.build()
        shared.load_state_dict(whole.state_dict())
        part = Part(dist.group.WORLD, rank, size)
        share_rows(shared, windows(model), part)
        expected, got = passes(whole, images), passes(shared, images.narrow(2, *part.span(height)))
        for name, parameter in shared.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            got[name] = parameter.grad / size
        outcomes += [(got[name] - tensor).abs().max().item() for name, tensor in expected.items()]
    return outcomes


def trained() -> list[Outcome]:
    work = [(case, framework) for case, framework, _ in TRAININGS[dist.get_world_size()].values()]
    return train_cases(work)


def facts() -> dict[str, Any]:
    with ready(Spatial(), make_job(PLAIN)) as (trainer, _):
        return trainer.facts() | {"place": trainer.place}


TRAIN: dict[str, Callable[[], Any]] = {"trained": trained, "differences": differences}
MORE: dict[str, Callable[[], Any]] = {
    "fault": partial(train_cases, [(PLAIN, WithoutHalo())]),
    "reloaded": partial(reload, PLAIN, Spatial()),
    "facts": facts,
}


@cache
def outcomes(world: int) -> list[dict[str, Any]]:
    """What each piece of work returned, by rank: one set of processes does it all."""
    return run_ranks(world, results, TRAIN | MORE if world == 2 else TRAIN)


CASES = [
    pytest.param(world, name, id=f"{world}-ranks-{name}", marks=pytest.mark.slow if world == 4 else ())
    for world, names in TRAININGS.items()
    for name in names
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_equals_one_plain_process(world: int, name: str) -> None:
    case, _, replicas = TRAININGS[world][name]
    outcome = dict(zip(TRAININGS[world], outcomes(world)[0]["trained"], strict=True))[name]
    assert_equal(outcome, reference(case, replicas), TOLERANCES[case.model.name, case.precision])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layer_equals_that_of_complete_images(world: int) -> None:
    assert max(max(each["differences"]) for each in outcomes(world)) < 1e-4


def test_a_forgotten_halo_is_noticed() -> None:
    tolerance = TOLERANCES["vgg", "fp32"].weights
    assert distance(outcomes(2)[0]["fault"][0].weights, reference(PLAIN, 1)) > 10 * tolerance


def test_a_loaded_state_is_what_it_computes_with_and_gives_back() -> None:
    assert_reloaded((rank["reloaded"] for rank in outcomes(2)), VGG16)


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
    refused(Spatial(), ranks(2, RESNET, compile=True), r"train\.compile=false")
    refused(Spatial(dp=2, sp=3), ranks(4, RESNET), r"dp=2 x framework\.sp=3 does not fill 4", UserError)
    wrong_knob(Spatial, r"framework\.sp=0 must be 1 or more", sp=0)
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
                begin, rows = owner.span(height)[0], window.lent(owner)[user.rank]
                assert window.taken(user)[owner.rank] == rows.stop - rows.start <= owner.span(height)[1]
                got += range(begin + rows.start, begin + rows.stop)
            # With a stride windows may skip rows between two that they reach.
            every = range(max(0, min(reached)), min(height, max(reached) + 1))
            assert {row for row in reached if 0 <= row < height} <= set(every)
            assert got == [*every], (height, size)


def test_neighbours_send_a_row_of_a_3x3_convolution() -> None:
    """Parts of 8 rows: the first one sends its last row, the others one in each direction."""
    window = Window(24, 3, 1, 1)
    lent = [[(rows.start, rows.stop) for rows in window.lent(Part(None, rank, 3))] for rank in range(3)]
    assert [lent[0][1], lent[1][0], lent[1][2], lent[2][1]] == [(7, 8), (0, 1), (7, 8), (0, 1)]
    assert [window.taken(Part(None, rank, 3)) for rank in range(3)] == [[8, 1, 0], [1, 8, 1], [0, 1, 8]]


def test_pooling_by_halves_needs_a_neighbour_only_where_a_part_is_odd() -> None:
    assert Window(24, 2, 2).taken(Part(None, 0, 2)) == [12, 0]
    assert Window(26, 2, 2).taken(Part(None, 0, 2)) == [13, 1]
