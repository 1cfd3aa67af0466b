"""Rules that hold for any repeats: what the order of runs, the unit of time and failed runs must not change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import comb
from statistics import median
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlbench.record.schema import EPOCHS, RUNS
from ddlbench.report.compare import versus
from ddlbench.results.reading.cells import frame
from ddlbench.results.rows import Row, group_by
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.quality import Target, learning_table, target_costs
from ddlbench.results.tables.scaling import scaling_rows
from ddlbench.results.tables.stats import Interval, median_interval
from ddlbench.results.tables.tables import records

quick = settings(max_examples=60)
few = settings(max_examples=25)  # each makes tables of several runs

Rates = list[list[float]]
GPUS, NODES = (1, 2, 8), (1, 1, 2)  # of single, and of ddp twice
rates: Any = st.lists(st.floats(1.0, 1e3), min_size=1, max_size=9)
campaigns: Any = st.tuples(rates, rates, rates)
NAMES: dict[str, Any] = dict.fromkeys(column.name for column in RUNS)
SHARED: dict[str, Any] = {
    "model": "resnet50", "loader": "native", "data": "sample", "recipe": "sgd", "mode": "train", "precision": "fp32",
    "device": "cuda", "device_model": "GPU", "flops_per_sample": 2e9, "tokens_per_sample": 7,
}  # fmt: skip
RATIOS = [
    f"{name}{own}{end}"
    for name in ("speedup", "efficiency")
    for own in ("", "_vs_own_base")
    for end in ("", "_low", "_high")
]


def attempt(framework: str, gpus: int, nodes: int, rate: float, **row: Any) -> AttemptRow:
    """A run at `rate` samples/s, with 32 samples on each GPU."""
    own = {"framework": framework, "gpus": gpus, "nodes": nodes, "batch_per_gpu": 32.0, "global_batch": 32 * gpus}
    measured = {"throughput_samples_per_s": rate, "epoch_time_s": 1024 / rate, "memory_allocated_peak_bytes": int(rate)}
    return AttemptRow(NAMES | SHARED | own | measured | {"status": "ok"} | row, {"framework.name": framework})


def groups(campaign: Sequence[Sequence[float]]) -> list[list[AttemptRow]]:
    sizes = zip(("single", "ddp", "ddp"), GPUS, NODES, campaign, strict=True)
    return [[attempt(name, gpus, nodes, rate) for rate in own] for name, gpus, nodes, own in sizes]


def rows_of(campaign: Sequence[list[AttemptRow]]) -> list[Row]:
    return [measurement.row for measurement in scaling_rows(campaign)]


@quick
@given(campaigns, st.randoms(use_true_random=False))
def test_the_order_of_runs_changes_nothing(campaign: Rates, random: Any) -> None:
    shuffled = [random.sample(own, len(own)) for own in groups(campaign)]
    assert rows_of(random.sample(shuffled, 3)) == rows_of(groups(campaign))


@quick
@given(campaigns, st.integers(-8, 8))
def test_another_unit_of_time_scales_times_and_leaves_ratios(campaign: Rates, power: int) -> None:
    """Powers of two: no digit is rounded."""
    factor = 2.0**power
    before, after = (rows_of(groups(own)) for own in (campaign, [[rate / factor for rate in own] for own in campaign]))
    for one, two in zip(before, after, strict=True):
        assert [two.get(name) for name in RATIOS] == [one.get(name) for name in RATIOS]
        for name in (name for name in one if name.endswith("time_s") or "_time_" in name):
            assert two[name] == (None if one[name] is None else one[name] * factor), name
        for name in ("throughput_samples_per_s", "throughput_samples_per_s_per_gpu", "tokens_per_s"):
            assert two[name] == one[name] / factor


@quick
@given(campaigns, st.floats(1.0, 1e3), st.sampled_from([0, 1, 2]))
def test_a_failed_run_is_counted_and_changes_no_number(campaign: Rates, rate: float, which: int) -> None:
    """Whatever it had reached before it failed."""
    more = groups(campaign)
    name, gpus, nodes = ("single", "ddp", "ddp")[which], GPUS[which], NODES[which]
    more[which].append(attempt(name, gpus, nodes, rate, status="killed", profile_window_s=1.0, profile_steps=1))
    for one, two in zip(rows_of(groups(campaign)), rows_of(more), strict=True):
        assert two == one | {"attempts_failed": int(two["gpus"] == gpus)}


@quick
@given(campaigns)
def test_every_number_and_interval_by_its_definition(campaign: Rates) -> None:
    result = rows_of(groups(campaign))
    times = {gpus: [1 / rate for rate in own] for gpus, own in zip(GPUS, campaign, strict=True)}
    assert [row["gpus"] for row in result] == [1, 2, 8]
    for row in result:
        own, gpus = times[row["gpus"]], row["gpus"]
        time = median(own)
        assert (row["sample_time_s"], row["runs_ok"], row["attempts_failed"]) == (time, len(own), 0)
        assert (row["sample_time_shortest_s"], row["sample_time_longest_s"]) == (min(own), max(own))
        assert row["memory_allocated_peak_bytes"] == int(max(campaign[GPUS.index(gpus)]))
        assert row["throughput_samples_per_s_per_gpu"] == pytest.approx(1 / time / gpus)
        assert row["tokens_per_s"] == pytest.approx(7 / time)
        assert row["model_flops_per_s_per_gpu"] == pytest.approx(2e9 / time / gpus)
        for suffix, base_gpus in (("", 1), ("_vs_own_base", min(gpus, 2))):
            base, share = median(times[base_gpus]), base_gpus / gpus
            assert row[f"speedup{suffix}"] == pytest.approx(base / time)
            assert row[f"efficiency{suffix}"] == pytest.approx(base / time * share)
            over, under = median_interval(times[base_gpus]), median_interval(own)
            low, high, verdict = (row.get(f"speedup{suffix}_{name}") for name in ("low", "high", "verdict"))
            if base_gpus == gpus or over is None or under is None:
                assert low is high is verdict is None
                continue
            assert (low, high) == (over.low / under.high, over.high / under.low)
            ends = (row[f"efficiency{suffix}_low"], row[f"efficiency{suffix}_high"])
            assert ends == (pytest.approx(low * share), pytest.approx(high * share))
            assert low <= row[f"speedup{suffix}"] <= high
            assert row[f"speedup{suffix}_coverage"] == pytest.approx(over.coverage + under.coverage - 1)


@quick
@given(st.lists(st.integers(-100, 100).map(float), min_size=1, max_size=40))
def test_an_interval_of_the_median_is_symmetric_and_covers_what_it_says(values: list[float]) -> None:
    result, mirrored, n = median_interval(values), median_interval([-value for value in values]), len(values)
    assert (result is None) == (n < 6)
    if result is None:
        return
    assert mirrored == Interval(-result.high, -result.low, result.coverage)
    assert result.low <= median(values) <= result.high
    ways = list(accumulate(comb(n, below) for below in range(n + 1)))
    rank = max(k for k in range(1, n // 2 + 1) if 1 - 2 * ways[k - 1] / 2**n >= 0.95)
    assert result == Interval(sorted(values)[rank - 1], sorted(values)[n - rank], 1 - 2 * ways[rank - 1] / 2**n)


@quick
@given(rates, rates)
def test_before_and_after_swapped_give_the_inverse_ratio(one: list[float], two: list[float]) -> None:
    sides = [[attempt("ddp", 2, 1, rate) for rate in own] for own in (one, two)]
    there, back = (versus([a], [b], limit=0.1) for a, b in (sides, reversed(sides)))
    times = [median([1 / rate for rate in own]) for own in (one, two)]
    for result, ratio in ((there, times[1] / times[0]), (back, times[0] / times[1])):
        assert f"ratio {ratio:.3f} (" in "\n".join(result.lines)
    assert bool(there.undecided) == bool(back.undecided) == (min(len(one), len(two)) < 6)
    assert not (there.slower and back.slower), "each cannot be slower than the other"


WANTED = Target("val_top1", 0.5)
# Runs: the epoch (from 1) in which each reaches the target, or None, of at most 5.
courses: Any = st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=9)


Course = tuple[int | None, str, int]  # of a run: the epoch in which it reaches the target, its status, its seed


def training(**curves: Sequence[Course]) -> tuple[list[Row], pd.DataFrame]:
    """Runs of 5 epochs of 100 samples and 7 s: their rows, and those of their epochs. curves: runs that are merged"""
    runs, epochs = list[Row](), list[Row]()
    for name, courses in curves.items():
        for number, (reached, status, seed) in enumerate(courses):
            own = {"path": f"{name}{number}", "status": status, "measurement": name}
            runs.append(NAMES | own | {"seed": seed, "learning": name})
            for n in range(5):
                top1 = 0.9 if reached is not None and n + 1 >= reached else 0.1
                costs = {"samples": 100, "updates": 10 * (n + 1), "elapsed_s": 7.0 * (n + 1)}
                epochs.append(own | costs | {"epoch": n, "val_top1": top1})
    return runs, frame(EPOCHS, epochs)


@few
@given(st.data(), courses)
def test_targets_count_every_run_that_ended_ok(data: st.DataObject, reached: list[int | None]) -> None:
    plain: list[Course] = [(epoch, "ok", 0) for epoch in reached]
    shuffled = data.draw(st.permutations(plain))
    runs, epochs = training(plain=plain, shuffled=shuffled, failed=[*plain, (1, "killed", 0)])
    row, *others = target_costs(WANTED, epochs, runs).rows
    assert [other | {"measurement": "plain"} for other in others] == [row, row]
    middle = median([float("inf") if epoch is None else epoch for epoch in reached])
    reference = None if middle == float("inf") else middle
    costs = {"epochs": 1, "updates": 10, "samples": 100, "seconds": 7.0}
    for name, cost in costs.items():
        assert row[f"{name}_to_target"] == (None if reference is None else reference * cost)
    assert (row["runs"], row["reached"]) == (len(reached), sum(epoch is not None for epoch in reached))


@few
@given(st.data(), courses)
def test_repeats_of_a_seed_and_failed_runs_are_no_evidence_on_quality(
    data: st.DataObject, reached: list[int | None]
) -> None:
    plain: list[Course] = [(epoch, "ok", seed) for seed, epoch in enumerate(reached)]
    again, failed = data.draw(st.sampled_from(plain)), (1, "diverged", 99)
    runs, epochs = training(plain=plain, doubled=[*plain, again], failed=[*plain, failed])
    rows = records(learning_table(epochs, [AttemptRow(run, {}) for run in runs]))
    first, doubled, with_failed = group_by(rows, lambda row: row["learning"]).values()
    assert [row | {"learning": "plain", "runs": row["runs"] - 1} for row in doubled] == first
    assert [row | {"learning": "plain"} for row in with_failed] == first
    for row in first:
        values = [0.9 if epoch is not None and row["epoch"] + 1 >= epoch else 0.1 for epoch in reached]
        result = [row[f"val_top1{end}"] for end in ("", "_min", "_max", "_low", "_high")]
        interval = median_interval(values)
        ends = (interval.low, interval.high) if interval else (None, None)
        assert result == [pytest.approx(median(values)), min(values), max(values), *ends]
