"""The numbers that one row has of several ranks: three gloo ranks with figures made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from ddlbench.errors import RunError
from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.load import HZ, Load
from ddlbench.measure.memory import PEAKS
from ddlbench.measure.meter import Use
from ddlbench.measure.rows import EpochRow, RankEpoch, gather_epoch
from ddlbench.measure.summary import summarise
from tests.support.ranks import run_ranks

GIB = 2**30
# Two ranks share the first pipeline stage; the last rank, on another node, has the second one and reports.
STAGES, HOSTS, LEADERS = (0, 0, 1), ("a", "a", "b"), (True, False, True)
STEP_S = ([4.0, 1.0, 1.0], [3.0, 1.0, 1.0], [5.0, 2.0, 2.0])  # [rank][step]
JOULES = (100.0, None, 40.0)
THREAD_S = (3.0, 6.0, 30.0)
LOADS = (
    (Load(0.1, 0.2, 0, 100, busy=10), Load(0.9, 0.0, 10, 200, busy=70)),
    None,
    (Load(0.4, 0.1, 0, 100, busy=10), Load(0.2, 0.3, 4, 200, busy=60)),
)
CPU_S = (0.1, 0.3, 0.2)  # of a core, in one epoch: 40 ticks of node a's 60, 20 of node b's 50


def rank_epoch(rank: int, epoch: int, samples: int | None) -> RankEpoch:
    seconds = [value * (epoch + 1) for value in STEP_S[rank]]
    load = LOADS[rank]
    use = Use(
        seconds=20.0 + rank + epoch,
        counts_energy=LEADERS[rank],
        energy_j=JOULES[rank],
        energy_source="rapl" if LEADERS[rank] else None,
        thread_s=THREAD_S[rank],
        cpu_before_s=5.0 + rank,
        cpu_after_s=5.0 + rank + CPU_S[rank] * 100 / HZ,
        before=load[0] if load else None,
        after=load[1] if load else None,
    )
    times = EpochTimes(
        sum(seconds), sum(seconds), 0.0, 0, seconds, [0.5] * 3, [0.25 * (rank + 1)] * 3, 0.3 * (rank == 2), [4] * 3, use
    )
    memory: dict[str, int | None] = dict.fromkeys(PEAKS) | {"memory_host_peak_bytes": (rank + 1 + epoch) * GIB}
    memory |= {"allocator_retries": 2 * (rank == 1)}
    return RankEpoch(rank, 0, times, [1.0] * 3, [0.1] * 3, memory, samples, HOSTS[rank], {"pp": STAGES[rank]})


def rows_of(epochs: int) -> list[EpochRow]:
    rank = dist.get_rank()
    reports = rank == 2
    return [
        gather_epoch(epoch, epochs, rank_epoch(rank, epoch, 12 if reports else None), 4, 3) for epoch in range(epochs)
    ]


def miscounted() -> str:
    rank = dist.get_rank()
    with pytest.raises(RunError) as caught:
        gather_epoch(0, 1, rank_epoch(rank, 0, 12), 4, 3)  # all three report for one replica
    return str(caught.value)


def work() -> dict[str, Any]:
    return {"one": rows_of(1), "three": rows_of(3), "miscounted": miscounted()}


@cache
def found() -> list[dict[str, Any]]:
    return run_ranks(3, work)


def one() -> EpochRow:
    return found()[0]["one"][0]


def test_first_step_and_steady_time_are_the_slowest_rank_s() -> None:
    row = one()
    assert row.first_step_s == 5.0
    assert (row.steady_samples, row.steady_time_s) == (8, 4.0)  # of 9 s on rank 2, 5 are its first step
    # 0.75 s of 9 on rank 0, 1.5 of 5 on rank 1, 2.25 of 9 on rank 2
    assert row.host_wait_share == pytest.approx(1.5 / 5)
    assert all(each["one"][0].line() == row.line() for each in found())


def test_energy_is_that_of_each_node_once() -> None:
    assert one().line()["energy_j"] == 140.0
    summary = summarise(found()[0]["three"], 3, None)
    # epochs 1 and 2, 12 samples each; 23 and 24 s between the readings on rank 2
    assert summary["energy_epoch_j"] == 140.0
    assert summary["energy_sample_j"] == pytest.approx(280 / 24)
    assert summary["power_mean_w"] == pytest.approx(280 / 47)
    assert summary["energy_source"] == "rapl"


def test_the_steady_rate_does_not_replace_the_throughput() -> None:
    summary = summarise(found()[0]["three"], 3, None)
    # epochs 1 and 2 take 18 and 27 s on the slowest rank, of which 10 and 15 are the first step
    assert summary["throughput_samples_per_s"] == pytest.approx(24 / 45)
    assert summary["throughput_steady_samples_per_s"] == pytest.approx(16 / 20)
    assert summary["epoch_first_step_s"] == 12.5


def test_memory_of_each_stage_is_its_fullest_rank_s() -> None:
    summary = summarise(found()[0]["three"], 3, None)
    assert summary["memory_host_by_stage_bytes"] == f"{4 * GIB} {5 * GIB}"
    assert summary["memory_allocated_by_stage_bytes"] is None
    assert summary["memory_host_peak_bytes"] == 5 * GIB


def test_the_slow_rank_is_the_one_of_its_stage() -> None:
    """Rank 2 computes most, but alone in its stage."""
    summary = summarise([one()], 3, None)
    assert summary["own_step_s"] == pytest.approx((30 - 0.3) / 3)  # without what its own thread loaded
    assert summary["own_step_median_rank_s"] == pytest.approx(2.0)
    assert (summary["straggler_rank"], summary["straggler_host"]) == (1, "a")


def test_a_rank_that_only_loads_has_no_step_of_its_own() -> None:
    """mode=loader: the loop's own microseconds would name one rank or another as slow."""
    trained = rank_epoch(1, 0, None)
    assert trained.own_step_s == 2.0
    assert replace(trained, losses=[], rates=[]).own_step_s is None


def test_load_of_the_busiest_node_from_the_first_epoch_to_the_last() -> None:
    summary = summarise(found()[0]["three"], 3, None)
    assert (summary["load_start"], summary["load_end"]) == (0.4, 0.9)
    assert (summary["cpu_pressure_start"], summary["cpu_pressure_end"]) == (0.2, 0.3)
    assert summary["cpu_steal_share"] == 0.1
    assert summary["cpu_others_share"] == pytest.approx(0.3)  # node b; without rank 1 it would be 0.5 on node a
    assert summary["marks"] == "allocator retries; load; cpu pressure; steal"


def test_a_sample_of_one_replica_counts_once() -> None:
    (message,) = {each["miscounted"] for each in found()}
    assert message.startswith("the batches of the 3 reporting ranks held 36 training samples in an epoch whose steps")


def test_only_rank_0_keeps_the_rows_of_all_ranks() -> None:
    assert [rank.host for rank in one().ranks] == list(HOSTS)
    assert [list(rank.times.step_s) for rank in one().ranks] == [list(seconds) for seconds in STEP_S]
    assert [each["one"][0].ranks for each in found()[1:]] == [[], []]
