"""How many groups a pipeline makes; what they do is tested with the frameworks that use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.shared.layout import Layout
from ddlbench.job import Job
from tests.support.jobs import CASE, job
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def made() -> dict[str, int]:
    return run_ranks(4, every_count, timeout_s=120)[0]


def every_count() -> dict[str, int]:
    """How many groups each mesh of four ranks makes."""
    parts, stages = Layout(dp=2, tp=2), Layout(pp=4)
    return {
        "parts": groups_made(parts, job()),
        "clipped": groups_made(parts, job(clip_norm=1.0)),
        "fp16": groups_made(parts, job("fp16")),
        "stages": groups_made(stages, job()),
        "tied": groups_made(stages, replace(job(), model=CASE.model)),
    }


def groups_made(layout: Layout, given: Job) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    Groups(replace(given, rank=dist.get_rank(), world_size=dist.get_world_size()), layout)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_the_ranks_of_a_replica_have_a_group_only_where_an_update_asks_for_it(made: dict[str, int]) -> None:
    assert (made["clipped"], made["fp16"]) == (made["parts"] + 1, made["parts"] + 1)


def test_both_ends_of_a_pipeline_have_a_group_only_where_they_share_a_weight(made: dict[str, int]) -> None:
    assert (made["stages"], made["tied"]) == (0, 1)  # the stages' own is that of all ranks
