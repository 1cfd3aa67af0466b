"""The steps of a profiled window are those of a long epoch, and they show a rank that sleeps: real windows on four
ranks. The lengths of a window and its section of the record by hand."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest

from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.job import Framework
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.profiling.spans import FORWARD
from ddlbench.measure.summary import own_columns, own_steps_of_window
from ddlbench.record.record import RESERVE_BYTES
from ddlbench.run.scenarios import lengths, profile_section
from tests.equality.cases import MODELS
from tests.run.scenarios.windows import windows
from tests.support.ranks import run_ranks
from tests.support.reference import Case

WORLD, ASKED = 4, 5
# PipeDream refuses tied weights.
CASE = Case("steps", replace(MODELS["gpt2"], tie_weights=False), global_batch=12, steps=10)  # pyright: ignore
FRAMEWORKS: dict[str, Framework] = {
    "local_sgd": LocalSGD(local_steps=3),
    "averages each step": LocalSGD(local_steps=1),
    "averages once in 99 steps": LocalSGD(local_steps=99),
    "pipedream": PipeDream(),
    "noop": DDP(comm_hook="noop"),
}


SLOW, SLOW_STEPS, SLEEP_S = 1, 2, 1.0


def late(trainer: Any, rank: int) -> Any:
    if rank == SLOW:
        trainer.model.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    return trainer


def show() -> list[dict[str, dict[str, Any]]]:
    of_slow: dict[str, Framework] = {"ddp": DDP(), "fsdp": FSDP()}
    return [windows(CASE, FRAMEWORKS, ASKED), windows(CASE, of_slow, SLOW_STEPS, late)]


@cache
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(WORLD, show)[0]


def seen() -> dict[str, dict[str, Any]]:
    return ranks()[0]


def test_a_window_has_as_many_averages_in_a_step_as_training() -> None:
    """One in the three steps of a period, none at the end of the window."""
    every, third = seen()["averages each step"], seen()["local_sgd"]
    assert (every["status"], every["steps"], third["status"], third["steps"]) == ("ok", 5, "ok", 3)
    for each, once in zip(every["ranks"], third["ranks"], strict=True):
        assert 0 < each["collectives"] == 5 * once["collectives"]


def test_a_window_shorter_than_a_period_is_no_error_and_has_no_shares() -> None:
    section = seen()["averages once in 99 steps"]
    assert (section["status"], section["lead_in_steps"], section["steps"]) == ("unknown", 0, 5)
    assert "the window has 5 steps after 0 others, and needs 99 after 0" in section["reason"]
    assert "choose profile_steps of at least 99, and epochs of at least 99 steps" in section["reason"]
    assert not any(name.endswith("_share") or name in ("window_s", "step_s") for name in section)


def test_a_pipeline_is_full_from_the_begin_to_the_end_of_a_window() -> None:
    """Each stage makes one forward pass, one backward pass and one update a step."""
    section = seen()["pipedream"]
    assert (section["status"], section["lead_in_steps"], section["steps"]) == ("ok", 5, 5)
    counts = [Counter(part for part, *_ in rank["passes"]) for rank in section["ranks"]]
    assert counts[0] == {"forward": 5, "backward": 5, "update": 5}
    assert counts == [counts[0]] * 3 + [counts[0] + Counter(forward=5)], "the last stage has the loss, too"


def test_a_framework_that_sends_nothing_by_design_communicates_for_0_seconds() -> None:
    section = seen()["noop"]
    assert (section["status"], section["reason"], section["comm_share"]) == ("ok", None, 0.0)
    assert [rank["collectives"] for rank in section["ranks"]] == [0] * WORLD


def test_the_rank_that_sleeps_is_named_by_its_host() -> None:
    """Its step without data wait and exposed communication is longer, though all ranks are equally late."""
    for name, section in ranks()[1].items():
        assert all(rank["window_s"] >= SLOW_STEPS * SLEEP_S for rank in section["ranks"])
        placed = [rank | {"host": f"node{rank['rank']}"} for rank in section["ranks"]]
        columns = own_columns(own_steps_of_window(section | {"ranks": placed}), "window")
        assert (columns["straggler_rank"], columns["straggler_host"]) == (SLOW, f"node{SLOW}"), name
        assert columns["own_step_s"] >= SLEEP_S, name


@pytest.mark.parametrize(
    ("facts", "asked", "most", "expected"),
    [
        ({}, 10, 100, (2, 10)),
        ({}, 10, 9, (2, 7)),
        ({}, 10, 1, (0, 1)),
        ({"local_steps": 8}, 10, 100, (2, 8)),
        ({"local_steps": 8}, 16, 100, (2, 16)),
        ({"local_steps": 8}, 16, 17, (2, 8)),
        ({"local_steps": 8}, 10, 9, (1, 8)),
        ({"local_steps": 30}, 10, 100, (2, 10)),
        ({"local_steps": 30}, 30, 20, (0, 20)),
        ({"staleness_theoretical": [3, 2, 1, 0]}, 10, 100, (5, 10)),
        ({"staleness_theoretical": [3, 2, 1, 0]}, 10, 3, (2, 1)),
    ],
)
def test_lengths_by_hand(facts: dict[str, Any], asked: int, most: int, expected: tuple[int, int]) -> None:
    assert lengths(facts, asked, most) == expected


SECONDS = Seconds(4.0, 1.0, 1.0, 0.0, 0.0, 1.5, 1.0, 0.5, 0.5)


def section_of(
    *collectives: int, facts: Mapping[str, Any] = {}, lead_in: int = 2, on_device: bool = False
) -> dict[str, Any]:
    """collectives: how many each rank has seen"""
    ranks = [RankWindow(rank, "node7", 0, 2, SECONDS, count, (FORWARD,)) for rank, count in enumerate(collectives)]
    return profile_section(ranks, lead_in, on_device, facts)


def test_the_section_by_hand() -> None:
    section = section_of(3, 5)
    assert (section["window_s"], section["step_s"]) == (8.0, 2.0)  # two ranks, two steps each
    assert (section["compute_share"], section["comm_exposed_share"]) == (0.5, 0.25)
    assert section["ranks"][1] == {
        "rank": 1, "host": "node7", "stage": 0, "collectives": 5, **asdict(SECONDS),
        "compute_s": 2.0, "own_s": 2.5, "own_step_s": 1.25,
    }  # fmt: skip


def test_the_reserved_space_holds_the_section_of_a_thousand_ranks() -> None:
    """On a full disk the last run.json has no other space."""
    assert len(json.dumps(section_of(*[300] * 1024), indent=1)) < RESERVE_BYTES / 2


def test_a_rank_that_shows_no_communication_is_an_error() -> None:
    section = section_of(3, 0)
    assert section["status"] == "error"
    assert "\n" not in section["reason"]
    assert "no communication was seen on rank 1 of 2 in 2 steps" in section["reason"]
    assert not any(name.endswith("_share") for name in section), "no share, rather than 0"
    assert [rank["collectives"] for rank in section["ranks"]] == [3, 0]


def test_one_rank_need_not_communicate() -> None:
    section = section_of(0)
    assert (section["status"], section["reason"], section["step_s"]) == ("ok", None, 2.0)


def test_communication_of_the_host_is_unknown_on_a_device_and_must_be_seen_on_the_host() -> None:
    section = section_of(0, 0, facts={"communication": "host"}, on_device=True)
    assert section["status"] == "unknown"
    assert "communicates from the host's memory" in section["reason"]
    assert not any(name.endswith("_share") or name in ("window_s", "step_s") for name in section)
    assert section_of(0, 0, facts={"communication": "host"})["status"] == "error"


def test_a_pipeline_that_is_not_full_is_unknown() -> None:
    facts = {"staleness_theoretical": [3, 2, 1, 0], "communication": "none"}
    assert section_of(0, 0, facts=facts, lead_in=2)["status"] == "unknown"
    assert section_of(0, 0, facts=facts, lead_in=3)["status"] == "ok"
