from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlbench.errors import Diverged
from ddlbench.measure.devices.usage import Load
from ddlbench.measure.marks import marks
from ddlbench.measure.profiling.profile import RankWindow, Seconds
from ddlbench.measure.rows import OwnStep
from ddlbench.measure.summary import (
    load_columns,
    own_columns,
    own_steps_of_window,
    straggler,
    summarize,
)
from tests.support.epoch_rows import epoch_row

QUIET = Load(load=0.1, pressure=0.02, ticks=(0, 0, 1000))


def test_epoch_0_is_left_out_where_there_are_more() -> None:
    rows = [
        epoch_row(0, 4, [5.0, 60.0, 1.0], warmup=1),
        epoch_row(1, 4, [1.0, 1.0, 2.0]),
        epoch_row(2, 4, [1.0, 2.0, 3.0]),
        epoch_row(3, 4, [2.5, 2.5, 10.0]),
    ]
    summary = summarize(rows, world_size=2, tokens_per_sample=10)
    assert summary["epochs_done"] == 4
    assert summary["epochs_measured"] == 3
    assert summary["epoch_time_s"] == 6.0  # of 4, 6 and 15
    assert (summary["epoch_time_min_s"], summary["epoch_time_max_s"]) == (4.0, 15.0)
    # 72 samples in 25 s; the epochs' own rates are 6, 4 and 1.6
    assert summary["throughput_samples_per_s"] == pytest.approx(2.88)
    assert summary["throughput_samples_per_s_per_gpu"] == pytest.approx(1.44)
    assert summary["tokens_per_s"] == pytest.approx(28.8)
    assert summary["first_step_s"] == 5.0
    assert summary["step_time_median_s"] == 2.0
    assert summary["step_time_p95_s"] == 10.0
    assert summary["data_wait_share"] == pytest.approx(0.25)


def test_the_wait_of_all_epochs_is_weighted_by_their_time() -> None:
    """A tenth of 2 s and half of 8 s wait: 4.2 of 10 s. Epoch 0 is not measured."""
    rows = [epoch_row(0, 3, [5.0]), epoch_row(1, 3, [2.0]), epoch_row(2, 3, [8.0])]
    for row, share in zip(rows, (0.9, 0.1, 0.5), strict=True):
        row.data_wait_share = share
    summary = summarize(rows, world_size=2, tokens_per_sample=None)
    assert summary["data_wait_mean_share"] == pytest.approx(0.42)
    assert summary["data_wait_share"] == 0.5


def test_sent_bytes_are_those_of_the_measured_epochs_a_step() -> None:
    """70 bytes in three steps; more in the warm-up, which is not measured."""
    rows = [epoch_row(epoch, 4, [1.0] * steps) for epoch, steps in enumerate((2, 1, 2))]
    for row, sent in zip(rows, (900, 40, 30), strict=True):
        row.sent_bytes = sent
    assert summarize(rows, world_size=2, tokens_per_sample=None)["sent_step_bytes"] == pytest.approx(70 / 3)
    rows[2].sent_bytes = None
    assert summarize(rows, world_size=2, tokens_per_sample=None)["sent_step_bytes"] is None
    alone = epoch_row(0, 4, [1.0] * 4, warmup=2)  # whose bytes are those of its warm-up steps too
    alone.sent_bytes = 80
    assert summarize([alone], world_size=2, tokens_per_sample=None)["sent_step_bytes"] == 20


def test_cpu_time_and_bytes_are_those_of_the_measured_epochs_a_second() -> None:
    """3.5, 5 and 1 s of CPU in epochs of 7, 2 and 4 s; in the warm-up, which is not measured, much more."""
    rows = [epoch_row(epoch, 4, [time_s]) for epoch, time_s in enumerate((20.0, 7.0, 2.0, 4.0))]
    for row, cpu_s, read in zip(rows, (100.0, 3.5, 5.0, 1.0), (900, 40, 10, 80), strict=True):
        row.cpu_time_s, row.metrics = cpu_s, {"read_bytes": read}
    summary = summarize(rows, world_size=2, tokens_per_sample=None)
    assert summary["cpu_share"] == pytest.approx(9.5 / 13 / 2)  # the epochs' own: 0.25, 1.25, 0.125
    assert summary["read_bytes_per_s"] == pytest.approx(130 / 13)
    rows[2].metrics["read_bytes"] = None
    assert summarize(rows, world_size=2, tokens_per_sample=None)["read_bytes_per_s"] is None
    one = epoch_row(0, 1, [5.0, 1.0, 3.0], warmup=1)
    one.cpu_time_s = 18.0
    assert summarize([one], world_size=2, tokens_per_sample=None)["cpu_share"] == 1.0  # over all of its 9 s


def test_one_epoch_measures_the_steps_after_the_warmup() -> None:
    summary = summarize([epoch_row(0, 1, [5.0, 1.0, 3.0], warmup=1)], world_size=1, tokens_per_sample=None)
    assert summary["epochs_measured"] == 1
    assert summary["epoch_time_s"] == 9.0  # the epoch whole
    assert summary["throughput_samples_per_s"] == pytest.approx(16 / 4)
    assert "tokens_per_s" not in summary
    assert "memory_allocated_peak_bytes" not in summary
    assert summary["memory_host_peak_bytes"] == 1000
    assert summary["memory_host_by_stage_bytes"] is None  # no pipeline


def test_step_times_are_those_after_the_warmup() -> None:
    """Steps of 1, 2, ... 19 and 200 s, after a warm-up of 50 and 90 s."""
    steps = [50.0, 90.0, 200.0, *map(float, range(19, 0, -1))]
    summary = summarize([epoch_row(0, 1, steps, warmup=2)], world_size=1, tokens_per_sample=None)
    assert (summary["step_time_median_s"], summary["step_time_p95_s"]) == (10.5, 19.0)


def test_a_run_without_epochs_claims_nothing() -> None:
    assert summarize([], world_size=1, tokens_per_sample=None) == {"epochs_done": 0}


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
    summary = summarize(rows, world_size=1, tokens_per_sample=None)
    assert summary["val_top1"] == 0.7
    assert summary["validation_time_s"] == 2.0


@pytest.mark.parametrize(("perplexities", "expected"), [((None, 5.0), 5.0), ((5.0, None), None)])
def test_quality_of_the_last_epoch_needs_no_earlier_one(
    perplexities: tuple[float | None, ...], expected: float | None
) -> None:
    """A perplexity of the first epoch may be beyond all floats."""
    rows = [epoch_row(n, 2, [1.0]) for n in range(2)]
    for row, value in zip(rows, perplexities, strict=True):
        row.metrics = {"val_perplexity_token": value}
    summary = summarize(rows, world_size=1, tokens_per_sample=None)
    assert summary.get("val_perplexity_token") == expected


def test_clocks_are_those_of_both_ends_and_whatever_slowed_any_epoch_marks_the_run() -> None:
    """The warm-up epoch too: a GPU that was hot before is hot after it."""
    clocks = ((1980, 1900, ("power cap",)), (1800, 1300, ("board limit",)), (1600, 1410, ()))
    rows = [epoch_row(epoch, 3, [1.0]) for epoch in range(3)]
    for row, (before, after, reasons) in zip(rows, clocks, strict=True):
        row.device_clock_before_mhz, row.device_clock_after_mhz, row.throttled = before, after, reasons
    rows[0].memory["allocator_retries"] = rows[2].memory["allocator_retries"] = 2
    summary = summarize(rows, world_size=1, tokens_per_sample=None)
    assert (summary["device_clock_start_mhz"], summary["device_clock_end_mhz"]) == (1980, 1410)
    assert summary["throttle_reasons"] == "board limit, power cap"
    assert summary["marks"] == "throttled; allocator retries"
    rows[2].memory["allocator_retries"] = 0
    summary = summarize(rows, world_size=1, tokens_per_sample=None)
    assert (summary["marks"], summary["allocator_retries"]) == ("throttled", 0), "those of the warm-up slow no number"


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 1000), min_size=3, max_size=3), min_size=2, max_size=6),
    st.sampled_from([2.0**-10, 0.5, 8.0]),
)
def test_times_keep_their_unit_rates_their_inverse_and_measured_epochs_have_no_order(
    epochs: list[list[int]], unit: float
) -> None:
    """Epoch 0 stays in its place: it is the warm-up, and its first step is the run's. Units are powers of two."""

    def summary(seconds: list[list[float]]) -> dict[str, Any]:
        return summarize([epoch_row(epoch, len(seconds), steps) for epoch, steps in enumerate(seconds)], 3, 10)

    plain = summary([list(map(float, steps)) for steps in epochs])
    other = summary([[second * unit for second in steps] for steps in (epochs[0], *epochs[:0:-1])])
    for name, value in plain.items():
        factor = unit if name.endswith("_s") and "per_s" not in name else 1 / unit if "per_s" in name else 1
        assert other[name] == (pytest.approx(value * factor) if isinstance(value, float) else value), name


def test_a_rank_s_own_step_is_the_median_over_the_measured_epochs() -> None:
    """One epoch in which a rank was late does not make it a straggler, nor does the warm-up."""
    rows = [epoch_row(epoch, 4, [1.0]) for epoch in range(4)]
    for row, late in zip(rows, (9.0, 0.104, 0.9, 0.1), strict=True):
        row.own_steps = [OwnStep(0, "node0", 0, 0.1), OwnStep(1, "node1", 0, late)]
    summary = summarize(rows, world_size=2, tokens_per_sample=None)
    assert (summary["own_step_s"], summary["own_step_source"]) == (0.104, "thread")
    assert summary["straggler_rank"] is None
    rows[-1].own_steps = []
    assert "own_step_s" not in summarize(rows, world_size=2, tokens_per_sample=None), "an epoch does not know them"


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


def test_the_node_with_the_most_counts_and_each_node_steals_for_itself() -> None:
    before = [QUIET, Load(load=0.4, pressure=None, ticks=(50, 0, 2000))]
    after = [Load(load=2.0, pressure=0.05, ticks=(10, 0, 1100)), Load(0.3, None, (51, 0, 2200))]
    assert load_columns(before, after) == {
        "load_start": 0.4,
        "load_end": 2.0,
        "cpu_pressure_start": 0.02,
        "cpu_pressure_end": 0.05,
        "cpu_steal_share": 0.1,  # 10 of 100 ticks; 1 of 200 on the other
        "cpu_others_share": None,
    }


@pytest.mark.parametrize(
    ("figure", "most"),
    [("cpu_others_share", 0.1), ("cpu_pressure_start", 0.1), ("cpu_pressure_end", 0.1), ("cpu_steal_share", 0.01)],
)
def test_each_figure_above_its_limit_is_a_mark(figure: str, most: float) -> None:
    quiet = load_columns([QUIET], [QUIET])
    name = {"cpu_others_share": "load", "cpu_steal_share": "steal"}.get(figure, "cpu pressure")
    assert marks([], 0, quiet | {figure: most}) == []
    assert marks([], 0, quiet | {figure: most + 0.001}) == [name]


def test_a_run_may_have_several_marks_and_its_own_load_is_none() -> None:
    unknown = load_columns([], [])
    assert set(unknown.values()) == {None}
    # Load averages have the run before in them.
    assert marks([], 0, unknown | {"load_start": 8.0, "load_end": 8.0}) == []
    assert marks(["power cap"], 3, unknown, {"read ahead": True, "cold epoch": False}) == [
        "throttled",
        "allocator retries",
        "read ahead",
    ]
