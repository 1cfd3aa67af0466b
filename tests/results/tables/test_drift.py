"""Efficiencies above 100 % and drift, by hand."""

from __future__ import annotations

from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.drift import drift
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.tables import make_tables
from tests.support.records import write_run


def doubts_of(results):
    return [text for text in make_tables(read_all([results])).warnings if "100 %" in text]


def test_an_efficiency_above_100_percent_is_questioned(tmp_path):
    write_run(tmp_path, framework="single", rate=100.0)
    write_run(tmp_path, gpus=2, rate=210.0)
    (text,) = doubts_of(tmp_path)
    assert text.startswith(
        "ddp, resnet50, 2 GPUs: efficiency of 105.0 % is above 100 % (without an interval): is the base"
    )
    assert "(single, 10 ms a sample)" in text


def test_an_interval_that_begins_below_100_percent_is_named(tmp_path):
    for repeat in range(6):
        write_run(tmp_path, framework="single", rate=100.0 + repeat, repeat=repeat)
        write_run(tmp_path, gpus=2, rate=204.0 + 2 * repeat, repeat=repeat)
    (text,) = doubts_of(tmp_path)
    # 204 / (2 x 105) = 97.1 %
    assert text.endswith("which its interval does not show: it begins at 97.1 %")


def test_efficiencies_up_to_100_percent_are_not(tmp_path):
    write_run(tmp_path, framework="single", rate=100.0)
    write_run(tmp_path, gpus=2, rate=200.0)
    assert doubts_of(tmp_path) == []


def runs(rates, hour=0):
    """Repeats that started hour after hour."""
    rows = [{"status": "ok", "start": f"2026-01-{hour + n:02}", "throughput_samples_per_s": rate} for n, rate in rates]
    return [AttemptRow(row, {}) for row in rows]


def test_drift_is_the_last_third_over_the_first():
    # two measurements of 3: seconds a sample over the median of each, in order of start
    slow = runs([(1, 10.0), (3, 8.0), (5, 5.0)])  # 0.1, 0.125, 0.2: 0.8, 1, 1.6
    fast = runs([(2, 100.0), (4, 80.0), (6, 50.0)])
    # first third: 0.8, 0.8; last third: 1.6, 1.6
    assert drift([slow, fast]) == (
        "drift: the last third of 6 repeated runs took 2.000 times the first third's time "
        "(n=2 each, too few for an interval)"
    )


def test_drift_is_a_ratio_of_medians_of_the_runs_that_ended_ok():
    """Seconds of eleven repeats in order of start: 1 2 7 | 4 4 4 4 4 | 3 5 9; those that failed took 1000."""
    seconds = (1.0, 2.0, 7.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 5.0, 9.0)
    group = runs([(n, 1 / time) for n, time in enumerate(seconds)])
    failed = [AttemptRow(run.row | {"status": "killed"}, {}) for run in runs([(n, 1e-3) for n in range(20, 26)])]
    found = drift([[*group, *failed]])
    assert found is not None
    assert found.startswith("drift: the last third of 11 repeated runs took 2.500 times the first third's time (n=3")


def test_drift_has_an_interval_from_18_runs_on():
    found = drift([runs([(n, 100.0 - n) for n in range(18)])])
    # seconds relative to each other: first third 1/100 to 1/95, last 1/88 to 1/83
    low, high = (1 / 88) / (1 / 95), (1 / 83) / (1 / 100)
    assert found is not None
    assert f"({low:.3f} to {high:.3f}, n=6 each: slower)" in found
    steady = drift([runs([(n, 100.0 + n % 3) for n in range(18)])])
    assert steady is not None
    assert "no drift shown" in steady


def test_runs_without_repeats_give_no_drift():
    assert drift([runs([(n, 100.0)]) for n in range(9)]) is None
