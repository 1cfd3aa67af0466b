"""What a job gives to every framework."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddlbench.config.compose import configuration, make_job
from ddlbench.data.feed import Request
from ddlbench.data.loaders.synthetic import random_batch
from ddlbench.errors import UserError
from ddlbench.job import Job, Place, example_batch, on_meta
from ddlbench.ranks.launchers import Launch
from tests.support.jobs import MODEL
from tests.support.jobs import job as small_job

ROOT = Path(__file__).parents[1]
SMALL = ("+framework=ddp", "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8")


def job(launch: Launch) -> Job:
    return make_job(configuration(*SMALL), launch, torch.device("cpu"))


def test_local_rank_is_the_launchers() -> None:
    assert job(Launch("srun", rank=5, world_size=8, local_rank=1, local_world_size=4)).local_rank == 1


def test_every_rank_builds_the_same_model() -> None:
    models = [job(Launch("torchrun", rank, 2, rank, 2)).build().state_dict() for rank in range(2)]
    for name, weight in models[0].items():
        assert torch.equal(weight, models[1][name]), name


def test_a_batch_below_the_number_of_replicas_has_one_remedy() -> None:
    with pytest.raises(UserError, match=r"\(rest 3\): choose train\.global_batch=4$"):
        replace(small_job(), global_batch=3).replica_batch(4)


def test_an_example_batch_has_the_shapes_and_types_of_a_loaders_batch() -> None:
    models = [configuration(*SMALL).model, configuration("+framework=ddp", "+model=gpt2_small").model]
    for model in models:
        made = random_batch(Request(model, Place(0, 1), torch.device("cpu"), 0, 2), 2)
        expected = [(tensor.shape, tensor.dtype) for tensor in vars(made).values()]
        assert [(tensor.shape, tensor.dtype) for tensor in vars(example_batch(model, 2)).values()] == expected


def test_the_page_on_extending_lists_every_place_that_asks_for_the_kind_of_data() -> None:
    page = (ROOT / "docs/extending.md").read_text().partition("## A kind of data")[2].partition("\n## ")[0]
    asks = re.compile(r'kind (==|!=) "(images|text)"')
    source = ROOT / "src/ddlbench"
    of_columns = source / "results"  # a column's kind
    places = [path for path in source.rglob("*.py") if asks.search(path.read_text()) and of_columns not in path.parents]
    assert {f"../{path.relative_to(ROOT)}" for path in places} == set(re.findall(r"\((\S+\.py)\)", page))


def test_a_model_without_weights_is_built_once() -> None:
    small = small_job()
    first = on_meta(small)
    assert all(parameter.is_meta for parameter in first.parameters())
    assert on_meta(replace(small, model=replace(MODEL))) is first
    assert on_meta(replace(small, model=replace(MODEL, num_classes=6))) is not first
