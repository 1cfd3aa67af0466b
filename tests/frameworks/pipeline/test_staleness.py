"""Counted staleness of one rank; that of two ranks' real steps is in test_clock.py."""

from __future__ import annotations

from ddlbench.frameworks.pipeline.staleness import Staleness


def test_the_most_of_this_stage_is_known_after_an_epoch() -> None:
    staleness = Staleness(stage=1, stages=3)
    staleness.gather()
    assert staleness.by_stage() is None, "no update was made"
    for updates in (0, 2, 1):
        staleness.count(updates)
    assert staleness.by_stage() is None
    staleness.gather()
    assert staleness.by_stage() == [0, 2, 0]


def test_updates_of_the_newest_weights_are_known_to_be_so() -> None:
    staleness = Staleness(stage=0, stages=1)
    staleness.count(0)
    staleness.gather()
    assert staleness.by_stage() == [0]
