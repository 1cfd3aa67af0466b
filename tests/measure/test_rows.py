"""One row from the epochs of several ranks: hand-made ones that differ in every figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlbench.errors import RunError
from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.devices.memory import PEAKS
from ddlbench.measure.rows import EpochRow, RankEpoch, gather_epoch, require_samples, require_val_samples
from tests.support.simulated import World

# Two replicas of two ranks; the middle of the times is neither their mean nor a rank's own. Rank 3 is the slowest, rank
# 1 waits longest for data, for the loader and for the others, and rank 2 holds most memory. No rank's steps add up to
# its time; the first step is a warm-up, after which rank 2 is the slowest.
STEPS = ([1.0, 1.0, 2.0], [3.0, 1.5, 1.5], [1.0, 4.0, 3.0], [2.0, 4.0, 10.0])
WAITS = ([1.0, 0.5, 0.25], [2.0, 0.75, 0.75], [0.5, 0.5, 1.25], [0.0, 1.0, 2.5])
HOST_WAITS = ([1.0, 0.25, 0.5], [2.0, 1.0, 1.0], [0.5, 1.0, 0.5], [0.0, 1.5, 2.5])
EPOCH_S = (4.5, 7.5, 16.5, 18.5)
MEASURED_S = (3.125, 4.0, 15.0, 14.0)
STRAGGLER_S = (3.0, 12.5, 8.0, 0.5)
ALLOCATED = (100, 300, 700, 200)
RETRIES = (0, 3, 1, 0)
LOSSES = ([1.0, 2.0, 3.0], [], [3.0, 4.0, 5.0], [])


def memory(rank: int) -> dict[str, int | None]:
    """The last figure is not known on rank 0."""
    return {
        "memory_allocated_peak_bytes": ALLOCATED[rank],
        "memory_reserved_peak_bytes": 2 * ALLOCATED[rank],
        "memory_device_peak_bytes": None,
        "memory_host_peak_bytes": None if rank == 0 else 1000 - rank,
        "allocator_retries": RETRIES[rank],
    }


def rank_epoch(rank: int) -> RankEpoch:
    seconds = EPOCH_S[rank], MEASURED_S[rank], STRAGGLER_S[rank]
    times = EpochTimes(*seconds, 1, STEPS[rank], WAITS[rank], HOST_WAITS[rank])
    reported = (12, None, 12, None)[rank]  # 3 steps of 4 samples of each replica
    return RankEpoch(rank, rank // 2, times, LOSSES[rank], [0.5, 0.25, 0.125], memory(rank), reported)


SECONDS = {name for name in EpochRow.__dataclass_fields__ if name.endswith("_s")}


def scaled(rank: RankEpoch, unit: float) -> RankEpoch:
    """Every time in another unit, a power of two, so that no digit is lost."""
    numbers = {name: getattr(rank.times, name) * unit for name in ("epoch_s", "measured_s", "straggler_s")}
    lists = {name: [s * unit for s in getattr(rank.times, name)] for name in ("step_s", "wait_s", "host_wait_s")}
    return replace(rank, times=replace(rank.times, **numbers, **lists))


def gathered(of_rank: Callable[[int], RankEpoch] = rank_epoch, epochs: int = 1) -> list[EpochRow]:
    """The row as each rank has it. of_rank: its epoch"""
    return World(4).run(lambda rank: gather_epoch(0, epochs, of_rank(rank), global_batch=8, updates=3))


def refusal(work: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(RunError) as caught:
        work(*arguments)
    return str(caught.value)


def test_a_row_by_hand() -> None:
    """Times are those of the slowest rank, also in each step; memory is that of the fullest one, and unknown where no
    rank knows it. Samples count once however many ranks share a replica, and ranks that do not report have no weight in
    the loss. Rank 1 has the longest first step, which the warm-up has left out of the steady time already."""
    memory = {
        "memory_allocated_peak_bytes": 700, "memory_reserved_peak_bytes": 1400, "memory_device_peak_bytes": None,
        "memory_host_peak_bytes": 999, "allocator_retries": 3,
    }  # fmt: skip
    expected = {
        "epoch_time_s": 18.5, "epoch_time_fastest_rank_s": 4.5, "measured_time_s": 15.0, "straggler_wait_s": 12.5,
        "epoch_time_median_rank_s": 12.0,  # of 7.5 and 16.5; the mean is 11.75
        "data_wait_share": 0.375,  # of the measured steps: 0.75 of 3.125, 1.5 of 4, 1.75 of 15, 3.5 of 14
        "host_wait_share": 0.5,  # 0.75 of 3.125, 2 of 4, 1.5 of 15, 4 of 14
        "first_step_s": 3.0, "slowest_s": [3.0, 4.0, 10.0], "steady_samples": 16, "steady_time_s": 15.0,
        "steps": 3, "samples": 24, "measured_steps": 2, "measured_samples": 16, "train_loss": 3.0, "lr_last": 0.125,
        "memory": memory,
    }  # fmt: skip
    row = gathered()[0]
    assert {name: getattr(row, name) for name in expected} == expected
    assert set(row.memory) == set(PEAKS)


def test_every_step_of_every_rank_is_kept_on_rank_0_and_none_elsewhere() -> None:
    first, *others = gathered()
    assert [rank.rank for rank in first.ranks] == [0, 1, 2, 3]
    assert [list(rank.times.step_s) for rank in first.ranks] == list(STEPS)
    assert [list(rank.times.wait_s) for rank in first.ranks] == list(WAITS)
    assert [row.ranks for row in others] == [[], [], []]


def test_all_ranks_have_the_same_row() -> None:
    first, *others = (row.line() for row in gathered())
    assert others == [first] * 3


@settings(max_examples=20)
@given(st.permutations(range(4)), st.sampled_from([2.0**-10, 0.5, 8.0]))
def test_no_rank_has_a_place_of_its_own_and_seconds_keep_their_unit(order: list[int], unit: float) -> None:
    """Ranks in another order, and all times in another unit: the same row, with its seconds in that unit."""
    plain, other = gathered()[0], gathered(lambda rank: scaled(rank_epoch(order[rank]), unit))[0]
    expected = {name: value * unit if name in SECONDS and value else value for name, value in plain.line().items()}
    assert other.line() == expected
    assert other.slowest_s == [seconds * unit for seconds in plain.slowest_s]


def test_the_first_loss_that_is_not_finite_on_any_rank_is_named_on_every_rank() -> None:
    losses = ([1.0, 1.0, math.nan], [], [1.0, math.nan, math.inf], [])
    rows = gathered(lambda rank: replace(rank_epoch(rank), losses=losses[rank]))
    assert [row.bad_step for row in rows] == [1] * 4


def test_epoch_0_of_several_is_a_warmup() -> None:
    assert gathered(epochs=2)[0].warmup
    assert not gathered(epochs=1)[0].warmup


def test_the_first_epoch_of_an_attempt_that_continues_another_one_is_a_warmup() -> None:
    def row(epoch: int, epochs: int) -> EpochRow:
        own = replace(rank_epoch(0), losses=[1.0, 1.0], samples=24)
        return gather_epoch(epoch, epochs, own, global_batch=8, updates=3, first=3)

    assert [row(epoch, 6).warmup for epoch in (3, 4, 5)] == [True, False, False]
    assert not row(3, 4).warmup  # the only one


def test_training_samples_of_the_reporting_ranks() -> None:
    require_samples([24, None, 24, None], 48)  # two pipelines of two stages
    for counted, held in (([24, 24, 24, 24], 96), ([24, None, 23, None], 47), ([24, None], 24), ([None, None], 0)):
        with pytest.raises(RunError, match=rf"held {held} training samples in an epoch whose steps have 48"):
            require_samples(counted, 48)


def test_a_sample_that_all_ranks_of_a_replica_report_is_refused_on_every_rank() -> None:
    (said,) = set(World(4).run(lambda rank: refusal(gather_epoch, 0, 1, replace(rank_epoch(rank), samples=12), 8, 3)))
    assert said.startswith("the batches of the 4 reporting ranks held 48 training samples in an epoch whose steps")


def test_a_validation_set_is_counted_whole() -> None:
    require_val_samples(5, 5, 0)
    require_val_samples(4, 5, unread_here=1)
    require_val_samples(5, 5, unread_here=1)  # nothing is missing: what could not be read is not asked
    for counted, unread in ((6, 0), (4, 0), (3, 1)):
        with pytest.raises(RunError, match=rf"{counted} validation samples were counted and {unread} could not be"):
            require_val_samples(counted, 5, unread)


def test_a_validation_sample_that_both_ranks_of_a_pipeline_cannot_read_counts_on_the_one_that_reports() -> None:
    assert World(2).run(lambda rank: require_val_samples(4, 5, unread_here=rank)) == [None, None]
    (said,) = set(World(2).run(lambda rank: refusal(require_val_samples, 3, 5, rank)))
    assert said.startswith("3 validation samples were counted and 1 could not be read, of 5: ")
