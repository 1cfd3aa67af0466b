from __future__ import annotations

import pytest

from ddlbench.errors import Diverged
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
