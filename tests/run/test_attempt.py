"""What the loop gets, from the place of its rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddlbench.job import Place
from ddlbench.ranks.boundary import StopAgreement
from ddlbench.run.attempt import make_run
from tests.support.simulated_run import job_of


@pytest.mark.parametrize(("rank", "local_rank", "leads"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_one_rank_of_each_node_reads_what_the_node_has_once(rank: int, local_rank: int, leads: bool) -> None:
    """Two nodes of two ranks: the energy of each node's CPU, and its load."""
    config, job = job_of(("+framework=ddp", "+model=resnet50"), 4)
    scenario: Any = SimpleNamespace(begin=lambda feed: {})
    supervisor: Any = SimpleNamespace(progressed=lambda: None, stop=StopAgreement())
    feed: Any = SimpleNamespace()
    here = replace(job, rank=rank, local_rank=local_rank)
    attempt: Any = SimpleNamespace(config=config, job=here, record=None, dataset={})
    run = make_run(attempt, scenario, Place(rank, 4), feed, supervisor)
    assert run.meter is not None
    assert run.meter.leader == leads
