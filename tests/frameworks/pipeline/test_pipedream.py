"""PipeDream's places, facts and refusals; neighbours send and receive in one order, also messages that are larger than
a socket's buffer. That it trains by its rules is tested in tests/equality/test_old_weights.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import UserError
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.pipedream_trainer import Link
from ddlbench.frameworks.pipeline.weights import UnstashedWeights
from ddlbench.job import Job, Place
from tests.equality.cases import MODELS
from tests.equality.knobs import with_optimizer
from tests.support.equal import make_job, ready
from tests.support.jobs import ranks, refused, wrong_knob
from tests.support.ranks import results, run_ranks
from tests.support.reference import Case

TIED: Any = MODELS["gpt2"]
NUMBERS = 1_000_000


def buffered(**knobs: Any) -> PipeDream:
    return PipeDream("pipedream_2bw", double_buffered=True, **knobs)


def look() -> tuple[Place, dict[str, Any]]:
    framework = buffered(balance_by="seconds")
    here = replace(make_job(Case("gpt2", TIED)), micro_batch=3)
    framework.check(here)
    with ready(framework, here) as (trainer, _):
        facts = trainer.facts()
        trainer.flush()  # nothing is in flight
        state = trainer.state()
        assert state is None or state.keys() == TIED.build().state_dict().keys()
        return trainer.place, facts


def corrected() -> dict[str, Any]:
    untied = Case("gpt2", replace(TIED, tie_weights=False))
    with ready(PipeDream(correction="pipemare"), make_job(untied)) as (trainer, _):
        assert isinstance(trainer.weights, UnstashedWeights) == (trainer.job.rank == 0), "the last stage is never late"
        assert any(name.startswith("velocity/") for name in trainer.live().rank_tensors) == (trainer.job.rank == 0)
        return trainer.facts()


def turns() -> list[float | None]:
    rank = dist.get_rank()
    border = torch.empty(NUMBERS, dtype=torch.float64, device="meta")
    link = Link(1 - rank, None, border, torch.device("cpu"))
    sends = [True, True, False] if rank == 0 else [False, True, True]
    receives = sends[::-1]  # only to rank 1, both ways, only to rank 0
    got: list[float | None] = []
    for turn, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        outgoing = torch.full((2, NUMBERS // 2), 10.0 * rank + turn, dtype=torch.float64).t() if send else None
        came = link.exchange(outgoing.reshape(NUMBERS) if outgoing is not None else None, receive)
        got.append(None if came is None else came.unique().item())
    assert link.exchange(None, receive=False) is None
    link.wait_for_send()
    return got


WORK: dict[str, Callable[[], Any]] = {"look": look, "corrected": corrected, "turns": turns}


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(2, results, WORK)


def test_both_ends_send_and_receive_in_the_same_order(on_two: list[dict[str, Any]]) -> None:
    assert [rank["turns"] for rank in on_two] == [[None, 11.0, 12.0], [0.0, 1.0, None]]


def test_every_rank_has_its_coordinates_and_stages(on_two: list[dict[str, Any]]) -> None:
    places, facts = zip(*(rank["look"] for rank in on_two), strict=True)
    assert [dict(place.coordinates) for place in places] == [{"dp": 0, "pp": 0}, {"dp": 0, "pp": 1}]
    assert [(place.reads_data, place.reports) for place in places] == [(True, False), (True, True)]
    assert facts[0] == facts[1], "both have the seconds that rank 0 measured"
    assert facts[0]["balanced_by"] == "seconds"
    assert len(facts[0]["block_seconds"]) == sum(facts[0]["blocks_per_stage"]) == 5
    assert min(facts[0]["block_seconds"]) > 0
    assert facts[0]["staleness_theoretical"] == [1, 1]
    assert facts[0]["staleness"] is None, "no step was made"
    assert facts[0]["weight_versions"] == [2, 1]
    assert facts[0]["micro_batches"] == 4
    assert facts[0]["activation_bytes"] == [3 * 16 * 32 * 4]  # three samples of 16 tokens x 32


@pytest.mark.slow
def test_the_ends_of_four_ranks_read_and_all_but_the_last_keep_two_versions() -> None:
    by_rank = run_ranks(4, look)
    assert [(place.reads_data, place.reports) for place, _ in by_rank] == [
        (True, False), (False, False), (False, False), (True, True),
    ]  # fmt: skip
    assert by_rank[0][1]["weight_versions"] == [2, 2, 2, 1]


def test_pipemare_keeps_one_set_of_weights(on_two: list[dict[str, Any]]) -> None:
    facts = on_two[0]["corrected"]
    assert (facts["weight_versions"], facts["correction"]) == ([1, 1], "pipemare")


def of(world_size: int, **keys: Any) -> Job:
    return ranks(world_size, MODELS["vgg"], **{"global_batch": 12, **keys})


predicting = partial(PipeDream, correction="prediction")
pipemare = partial(PipeDream, correction="pipemare")


@pytest.mark.parametrize(
    ("framework", "given", "says"),
    [
        (PipeDream(), of(24, global_batch=24), r"24 stages \(24 ranks in a pipeline\) but the model has 16 blocks"),
        (predicting(), of(2, **with_optimizer("sgd")), r"without momentum .*choose sgd with mom"),
        (predicting(), of(2, **with_optimizer("lars")), "there is no rule for Lars"),
        (pipemare(), of(2, precision="bf16"), r"=pipemare: in bf16 .*set train\.precision=fp32"),
        (pipemare(), of(2, micro_batch=6), r"weights of several ages: set train\.micro_batch=null"),
        (pipemare(), of(2, checkpoint_activations=True), r"set train\.checkpoint_activations=false"),
        (buffered(correction="pipemare"), of(2, micro_batch=6), "keeps the weights of the forward pass .*=pipedream"),
    ],
)
def test_unsupported_settings_are_refused_before_anything_starts(framework: PipeDream, given: Job, says: str) -> None:
    refused(framework, given, says)


def test_one_stage_may_be_clipped_and_have_tied_weights() -> None:
    PipeDream().check(ranks(1, TIED, clip_norm=1.0))


def test_wrong_numbers_are_named() -> None:
    wrong_knob(PipeDream, r"framework\.dp=0", dp=0)
    wrong_knob(PipeDream, r"framework\.flops_per_byte=-1", flops_per_byte=-1)
    wrong_knob(PipeDream, r"framework\.correction=guess", correction="guess")
    wrong_knob(PipeDream, r"framework\.discrepancy_decay=1\.0", discrepancy_decay=1.0)
    wrong_knob(PipeDream, r"framework\.reschedule_updates=-1", reschedule_updates=-1)
    two = r"pipedream_2bw over 4 ranks cannot run 2 micro .* choose train\.micro_batch=3"
    refused(buffered(), of(4, micro_batch=6), two, UserError)
