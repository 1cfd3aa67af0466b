"""The numbers that one row has of several ranks, with figures made by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.devices.memory import PEAKS
from ddlbench.measure.devices.meter import Use
from ddlbench.measure.devices.usage import HZ, Load
from ddlbench.measure.rows import EpochRow, OwnStep, RankEpoch, gather_epoch
from ddlbench.measure.summary import summarize
from tests.support.simulated import World

GIB = 2**30
# Two ranks share the first pipeline stage; the last rank, on another node, has the second one and reports.
STAGES, HOSTS, LEADERS = (0, 0, 1), ("a", "a", "b"), (True, False, True)
# Rank 0 has the longest first step, rank 2 the longest epoch. Epoch 0 is the warm-up; the middle of the others is not
# their mean.
STEP_S = ([6.0, 1.0, 1.0], [3.0, 1.0, 1.0], [5.0, 2.0, 2.0])  # [rank][step]
PACE, STRAGGLER_S, GROWN_GIB, ENERGY = (1.0, 2.0, 3.0, 7.0), (0.9, 0.3, 0.6, 0.4), (9, 1, 3, 2), (10, 1, 2, 6)
HELD_GIB = (1, 4, 2)
JOULES = (100.0, None, 40.0)
THREAD_S = (3.0, 6.0, 30.0)
# Load average, pressure, and ticks that were stolen, passed and busy, before and after epoch 0.
READINGS = (
    ((0.1, 0.2, 0, 100, 10), (0.9, 0.0, 10, 200, 70)),
    None,
    ((0.4, 0.1, 0, 100, 10), (0.2, 0.3, 4, 200, 60)),
)
CPU_S = (0.1, 0.3, 0.2)  # of a core, in one epoch: 40 ticks of node a's 60, 20 of node b's 50


def load(reading: tuple[float, float, int, int, int], epoch: int) -> Load:
    """Each epoch begins 150 ticks after the one before, of which 90 were busy and 20 stolen; averages fall."""
    average, pressure, stolen, ticks, busy = reading
    fallen = 0.01 * epoch
    return Load(average - fallen, pressure - fallen, (stolen + 20 * epoch, busy + 90 * epoch, ticks + 150 * epoch))


def rank_epoch(rank: int, epoch: int, samples: int | None, warmup: int = 0) -> RankEpoch:
    seconds = [value * PACE[epoch] for value in STEP_S[rank]]
    readings, joules, cpu_s = READINGS[rank], JOULES[rank], 5.0 + rank + 25 * epoch / HZ
    use = Use(
        seconds=20.0 + rank + epoch,
        counts_energy=LEADERS[rank],
        energy_j=None if joules is None else joules * ENERGY[epoch],
        energy_source="rapl" if LEADERS[rank] else None,
        thread_s=THREAD_S[rank],
        cpu_before_s=cpu_s,
        cpu_after_s=cpu_s + CPU_S[rank] * 100 / HZ,
        before=load(readings[0], epoch) if readings else None,
        after=load(readings[1], epoch) if readings else None,
    )
    times = EpochTimes(
        sum(seconds), sum(seconds[warmup:]), STRAGGLER_S[epoch] * (rank == 1), warmup, seconds, [0.5] * 3,
        [0.375 * (rank + 1)] * 3, 0.3 * (rank == 2), [4] * 3, use,
    )  # fmt: skip
    held = (HELD_GIB[rank] + GROWN_GIB[epoch]) * GIB
    memory: dict[str, int | None] = dict.fromkeys(PEAKS) | {"memory_host_peak_bytes": held}
    memory |= {"allocator_retries": 2 * (rank == 1)}
    return RankEpoch(rank, 0, times, [1.0] * 3, [0.1] * 3, memory, samples, HOSTS[rank], {"pp": STAGES[rank]})


def rows_of(rank: int, epochs: int, warmup: int = 0) -> list[EpochRow]:
    samples = 12 if rank == 2 else None
    return [gather_epoch(epoch, epochs, rank_epoch(rank, epoch, samples, warmup), 4, 3) for epoch in range(epochs)]


@cache
def results() -> list[dict[str, Any]]:
    return World(3).run(
        lambda rank: {"one": rows_of(rank, 1), "warmed": rows_of(rank, 1, warmup=1), "four": rows_of(rank, 4)}
    )


def one() -> EpochRow:
    return results()[0]["one"][0]


def test_first_step_and_steady_time_are_the_slowest_rank_s() -> None:
    row = one()
    assert row.first_step_s == 6.0
    assert (row.steady_samples, row.steady_time_s) == (8, 4.0)  # of 9 s on rank 2, 5 are its own first step
    # 1.125 s of 8 on rank 0, 2.25 of 5 on rank 1, 3.375 of 9 on rank 2
    assert row.host_wait_share == pytest.approx(0.45)
    assert all(each["one"][0].line() == row.line() for each in results())


def test_a_summary_by_hand() -> None:
    """Energy and load are those of each node once, memory that of the fullest rank of each stage, waits the longest of
    the measured epochs, although all are longer in the warm-up. The steady rate does not replace the throughput."""
    assert one().line()["energy_j"] == 1400.0
    expected = {
        # Epochs 1 to 3 take 18, 27 and 63 s on the slowest rank, of which 10, 15 and 35 are its first step.
        "epoch_time_min_s": 18.0, "epoch_time_max_s": 63.0, "throughput_samples_per_s": pytest.approx(36 / 108),
        "throughput_steady_samples_per_s": pytest.approx(24 / 48), "epoch_first_step_s": 18.0,  # 12, 18, 42 on rank 0
        # Those of rank 1 in epoch 1.
        "data_wait_share": pytest.approx(1.5 / 10), "host_wait_share": pytest.approx(2.25 / 10),
        "straggler_wait_s": 0.6,
        # 140, 280 and 840 J, 12 samples each; 23, 24 and 25 s between the readings on rank 2.
        "energy_epoch_j": 280.0, "energy_sample_j": pytest.approx(1260 / 36),
        "power_mean_w": pytest.approx(1260 / 72), "energy_source": "rapl",
        "memory_host_by_stage_bytes": f"{7 * GIB} {5 * GIB}", "memory_allocated_by_stage_bytes": None,
        "memory_host_peak_bytes": 7 * GIB,
        # Of the busiest node from the first epoch to the last: 550 ticks, of which 320 are busy on both nodes; the
        # ranks' own are 190 on node a, 95 on node b. In the last epoch alone others computed in 0.3 of the time.
        "load_start": 0.4, "load_end": pytest.approx(0.87),
        "cpu_pressure_start": 0.2, "cpu_pressure_end": pytest.approx(0.27),
        "cpu_steal_share": pytest.approx(70 / 550), "cpu_others_share": pytest.approx(225 / 550),
        "marks": "allocator retries; load; cpu pressure; steal",
    }  # fmt: skip
    summary = summarize(results()[0]["four"], 3, None)
    assert {name: summary[name] for name in expected} == expected


def test_energy_and_first_step_are_those_of_the_warmup_too() -> None:
    """The counters are read at the ends of an epoch alone."""
    summary = summarize(results()[0]["warmed"], 3, None)
    assert summary["energy_sample_j"] == pytest.approx(1400 / 12)
    assert summary["power_mean_w"] == pytest.approx(1400 / 22)
    assert summary["epoch_first_step_s"] == 6.0  # though it is a warm-up


def test_energy_that_one_epoch_does_not_know_is_unknown() -> None:
    rows = [replace(row) for row in results()[0]["four"]]
    rows[2].energy_j = None
    assert summarize(rows, 3, None)["energy_epoch_j"] is None


@pytest.mark.parametrize("rows", ["one", "warmed"])
def test_the_slow_rank_is_the_one_of_its_stage(rows: str) -> None:
    """Rank 2 computes most, but alone in its stage. The thread's seconds are those of all steps, warm-up or not."""
    summary = summarize(results()[0][rows], 3, None)
    assert summary["own_step_s"] == pytest.approx((30 - 0.3) / 3)  # without what its own thread loaded
    assert summary["own_step_median_rank_s"] == pytest.approx(2.0)
    assert (summary["straggler_rank"], summary["straggler_host"]) == (1, "a")


def test_a_rank_that_only_loads_has_no_step_of_its_own() -> None:
    """mode=loader: the loop's own microseconds would name one rank or another as slow."""
    trained = rank_epoch(1, 0, None)
    assert one().with_ranks([trained]).own_steps == [OwnStep(1, trained.host, trained.stage, 2.0)]
    loading = replace(trained, losses=[], rates=[])
    assert one().with_ranks([loading]).own_steps == []
    row = one().with_ranks([rank_epoch(0, 0, None), loading, rank_epoch(2, 0, 12)])
    assert row.own_steps == [], "the ranks that are known say nothing of the others"
