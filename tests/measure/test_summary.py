from __future__ import annotations

import pytest

from ddlbench.errors import Diverged
from ddlbench.measure.meter import OverRanks
from ddlbench.measure.straggler import OwnStep
from ddlbench.measure.summary import summarise
from tests.support.epoch_rows import epoch_row, rank_epoch


def test_epoch_0_is_left_out_where_there_are_more() -> None:
    rows = [
        epoch_row(0, 3, [5.0, 1.0, 1.0], warmup=1),
        epoch_row(1, 3, [1.0, 1.0, 2.0]),
        epoch_row(2, 3, [1.0, 2.0, 3.0]),
    ]
    summary = summarise(rows, world_size=2, tokens_per_sample=10)
    assert summary["epochs_done"] == 3
    assert summary["epochs_measured"] == 2
    assert summary["epoch_time_s"] == 5.0  # median of 4 and 6
    assert (summary["epoch_time_min_s"], summary["epoch_time_max_s"]) == (4.0, 6.0)
    # 48 samples in 10 s; the mean of the epochs' own rates would be 5
    assert summary["throughput_samples_per_s"] == pytest.approx(4.8)
    assert summary["throughput_samples_per_s_per_gpu"] == pytest.approx(2.4)
    assert summary["tokens_per_s"] == pytest.approx(48.0)
    assert summary["first_step_s"] == 5.0
    assert summary["step_time_median_s"] == 1.5
    assert summary["step_time_p95_s"] == 3.0
    assert summary["data_wait_share"] == pytest.approx(0.25)


def test_one_epoch_measures_the_steps_after_the_warmup() -> None:
    summary = summarise([epoch_row(0, 1, [5.0, 1.0, 3.0], warmup=1)], world_size=1, tokens_per_sample=None)
    assert summary["epochs_measured"] == 1
    assert summary["epoch_time_s"] == 9.0  # the epoch whole
    assert summary["throughput_samples_per_s"] == pytest.approx(16 / 4)
    assert summary["tokens_per_s"] is None
    assert summary["memory_allocated_peak_bytes"] is None
    assert summary["memory_host_peak_bytes"] == 1000


def test_step_times_are_those_after_the_warmup() -> None:
    """Of 5, 9, 1, 2 and 4 s the first two are a warm-up."""
    summary = summarise([epoch_row(0, 1, [5.0, 9.0, 1.0, 2.0, 4.0], warmup=2)], world_size=1, tokens_per_sample=None)
    assert (summary["step_time_median_s"], summary["step_time_p95_s"]) == (2.0, 4.0)


def test_a_run_without_epochs_claims_nothing() -> None:
    assert summarise([], world_size=1, tokens_per_sample=None) == {"epochs_done": 0}


def test_the_slowest_rank_counts_at_each_step() -> None:
    row = epoch_row(0, 1, [1.0, 1.0])
    row.ranks = [rank_epoch([1.0, 4.0]), rank_epoch([2.0, 3.0], rank=1)]
    assert summarise([row], 2, None)["step_time_median_s"] == 3.0  # of 2 and 4


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    row = epoch_row(0, 1, [1.0, 1.0, 1.0], losses=[1.0, float("nan"), float("nan")])
    assert not row.finite
    assert row.line()["train_loss"] is None
    with pytest.raises(Diverged, match="epoch 0, step 1"):
        row.require_finite()


def test_quality_is_that_of_the_last_epoch_and_the_warmup_s_validation_is_left_out() -> None:
    rows = [epoch_row(epoch, 4, [1.0]) for epoch in range(4)]
    for row, top1, seconds in zip(rows, (0.1, 0.8, 0.3, 0.7), (50.0, 1.0, 2.0, 9.0), strict=True):
        row.metrics = {"val_top1": top1, "validation_time_s": seconds}
    summary = summarise(rows, world_size=1, tokens_per_sample=None)
    assert summary["val_top1"] == 0.7
    assert summary["validation_time_s"] == 2.0


def test_clocks_are_those_of_both_ends_and_whatever_slowed_any_epoch_marks_the_run() -> None:
    """The warm-up epoch too: a GPU that was hot before is hot after it."""
    uses = (
        OverRanks(clock_before_mhz=1980, clock_after_mhz=1900, throttled=("power cap",)),
        OverRanks(clock_before_mhz=1800, clock_after_mhz=1700, throttled=("board limit",)),
        OverRanks(clock_before_mhz=1600, clock_after_mhz=1410),
    )
    rows = [epoch_row(epoch, 3, [1.0]) for epoch in range(3)]
    for row, use in zip(rows, uses, strict=True):
        row.use = use
    rows[0].memory["allocator_retries"] = 2
    summary = summarise(rows, world_size=1, tokens_per_sample=None)
    assert (summary["device_clock_start_mhz"], summary["device_clock_end_mhz"]) == (1980, 1410)
    assert summary["throttle_reasons"] == "board limit, power cap"
    assert summary["marks"] == "throttled; allocator retries"


def test_a_rank_s_own_step_is_the_median_over_the_measured_epochs() -> None:
    """One epoch in which a rank was late does not make it a straggler, nor does the warm-up."""
    rows = [epoch_row(epoch, 4, [1.0]) for epoch in range(4)]
    for row, late in zip(rows, (9.0, 0.1, 0.9, 0.104), strict=True):
        row.own_steps = [OwnStep(0, "node0", 0, 0.1), OwnStep(1, "node1", 0, late)]
    summary = summarise(rows, world_size=2, tokens_per_sample=None)
    assert (summary["own_step_s"], summary["own_step_source"]) == (0.104, "thread")
    assert summary["straggler_rank"] is None
