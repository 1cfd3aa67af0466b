from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.straggler import OwnStep, own_columns, own_steps_of_window, straggler


def ranks(*seconds: float, stages: tuple[int, ...] = ()) -> list[OwnStep]:
    places = stages or (0,) * len(seconds)
    return [
        OwnStep(rank, f"node{rank // 2}", place, own)
        for rank, (own, place) in enumerate(zip(seconds, places, strict=True))
    ]


def test_all_ranks_are_equally_late_but_not_by_their_own_step() -> None:
    """Rank 1 sleeps 0.5 s a step of 0.6: the others spend that in the all-reduce."""
    places = (("node0", 0, 2.5), ("node1", 0, 0.0), ("node1", 1, 2.5))
    lines = [
        RankWindow(rank, host, stage, 5, Seconds(3.0, 0.0, 0.0, 0.0, 0.4, exposed_s, exposed_s, 0.1, 0.0), 1, ()).line()
        for rank, (host, stage, exposed_s) in enumerate(places)
    ]
    own = own_steps_of_window({"status": "ok", "ranks": lines})
    assert [each.seconds for each in own] == pytest.approx([0.08, 0.58, 0.08])
    assert [each.stage for each in own] == [0, 0, 1]
    columns = own_columns(own, "window")
    assert columns == {
        "own_step_s": pytest.approx(0.58),
        "own_step_median_rank_s": pytest.approx(0.08),
        "own_step_source": "window",
        "straggler_rank": 1,
        "straggler_host": "node1",
    }


def test_a_tenth_more_than_the_others_is_no_straggler() -> None:
    assert straggler(ranks(1.0, 1.099, 1.0)) is None
    assert straggler(ranks(1.0, 1.0, 1.101)) == OwnStep(2, "node1", 0, 1.101)
    assert straggler(ranks(1.0)) is None
    assert straggler(ranks(0.0, 0.0)) is None


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    """Not with their mean, nor with their fastest or slowest, nor with a median that it is in itself."""
    assert straggler(ranks(1.0, 1.0, 1.14, 1.15)) == OwnStep(3, "node1", 0, 1.15)
    assert straggler(ranks(0.5, 1.0, 1.0, 1.09)) is None


def test_of_several_stages_the_rank_that_exceeds_its_own_by_the_largest_share_counts() -> None:
    """A fifth in stage 0, 0.3 in stage 1, a quarter in stage 2, whose ranks take longest."""
    slow = straggler(ranks(1.0, 1.2, 2.0, 2.6, 4.0, 5.0, stages=(0, 0, 1, 1, 2, 2)))
    assert slow == OwnStep(3, "node1", 1, 2.6)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_neither_the_order_of_ranks_nor_the_unit_changes_the_straggler(seconds: list[int], random: Random) -> None:
    own = ranks(*map(float, seconds))
    mixed = [replace(each, seconds=each.seconds / 1024) for each in random.sample(own, len(own))]
    result, other = straggler(own), straggler(mixed)
    assert (result and result.seconds) == (other and other.seconds * 1024)


def test_only_ranks_of_one_stage_are_compared() -> None:
    """The last stage has twice the work of the first, and no rank is slow."""
    assert straggler(ranks(1.0, 1.0, 2.0, 2.0, stages=(0, 0, 1, 1))) is None
    assert straggler(ranks(1.0, 1.3, 2.0, 2.0, stages=(0, 0, 1, 1))) == OwnStep(1, "node0", 0, 1.3)
    assert straggler(ranks(1.0, 9.0, stages=(0, 1))) is None  # nothing to compare with


def test_nothing_known_claims_nothing() -> None:
    assert own_columns([], "thread") == {}
    assert own_steps_of_window({}) == []
    assert own_steps_of_window({"status": "unknown", "ranks": [{"rank": 0}]}) == []
