"""scaling.csv: speedup, efficiency and merged repeats against numbers worked out by hand."""

from __future__ import annotations

import pytest

from ddlbench.measure.marks import NOTHING_SENT
from ddlbench.record.schema import SCALING
from ddlbench.results.tables.tables import records
from tests.support.records import edited, strong_scaling, tables_of, weak_scaling, write_repeats, write_run


def rows_of(results):
    return records(tables_of(results).scaling)


def row_of(rows, **wanted):
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def test_weak_scaling_by_hand(tmp_path):
    weak_scaling(tmp_path)
    rows = rows_of(tmp_path)
    assert {row["scaling"] for row in rows} == {"weak"}
    # ddp: 80, 150, 280 samples/s on 1, 2, 4; single: 100 on 1
    four = row_of(rows, framework="ddp", gpus=4)
    names = ("own_base_framework", "own_base_gpus", "best_single_framework")
    assert [four[name] for name in names] == ["ddp", 1, "single"]
    numbers = {
        "sample_time_s": 1 / 280, "speedup": 2.8, "efficiency": 0.7, "best_single_epoch_time_s": 10.24,
        "speedup_vs_own_base": 3.5, "efficiency_vs_own_base": 0.875, "own_base_sample_time_s": 1 / 80,
        "own_base_epoch_time_s": 12.8,  # 1024 samples at 80 a second
    }  # fmt: skip
    assert {name: four[name] for name in numbers} == pytest.approx(numbers)
    two, one = (row_of(rows, framework="ddp", gpus=gpus) for gpus in (2, 1))
    assert (two["speedup_vs_own_base"], two["efficiency_vs_own_base"]) == (pytest.approx(1.875), pytest.approx(0.9375))
    assert (one["speedup_vs_own_base"], one["speedup"]) == (pytest.approx(1.0), pytest.approx(0.8))
    eight = row_of(rows, gpus=8)
    assert (eight["status"], eight["reason"], eight["runs_ok"]) == ("oom", "CUDA out of memory", 0)
    assert eight["speedup_vs_own_base"] is eight["interval"] is None
    order = [(row["framework"], row["gpus"]) for row in rows]
    assert order == [("single", 1), *(("ddp", gpus) for gpus in (1, 2, 4, 8))], "bases come first"


def test_strong_scaling_from_a_base_of_two_by_hand(tmp_path):
    strong_scaling(tmp_path)
    rows = rows_of(tmp_path)
    assert {row["scaling"] for row in rows} == {"strong"}
    # 10, 19, 32 samples/s on 2, 4, 8
    eight = row_of(rows, gpus=8)
    assert (eight["speedup_vs_own_base"], eight["own_base_gpus"]) == (pytest.approx(3.2), 2)
    assert eight["efficiency_vs_own_base"] == pytest.approx(0.8)
    assert eight["speedup"] is None, "nothing ran on one GPU"
    assert eight["tokens_per_s"] == pytest.approx(32 * 1024)


def test_a_reference_is_named_and_neither_compared_nor_a_base(tmp_path):
    """ddp without sending gradients would be the fastest on one GPU, and twice as fast on two."""
    weak_scaling(tmp_path)
    without = {"sections": {"framework": {"reference": "gradients are not sent"}}, "knobs": {"comm_hook": "noop"}}
    for gpus in (1, 2):
        write_repeats(tmp_path, *[400.0 * gpus] * 6, gpus=gpus, **without)
    rows = rows_of(tmp_path)
    references = [row for row in rows if row["marks"] and "reference: gradients are not sent" in row["marks"]]
    assert [row["gpus"] for row in references] == [1, 2]
    for row in references:
        ratios = [name for name in row if name.startswith(("speedup", "efficiency", "best_single", "own_base"))]
        assert not any(row[name] for name in ratios)
        assert not {other["comparison"] for other in rows if other not in references} & {row["comparison"]}
    four = row_of(rows, framework="ddp", gpus=4)
    assert (four["best_single_framework"], four["speedup"]) == ("single", pytest.approx(2.8))


def test_a_reference_that_failed_before_its_setup_is_a_reference(tmp_path):
    without = {"gpus": 2, "knobs": {"comm_hook": "noop"}}
    write_run(tmp_path, sections={"framework": {"reference": NOTHING_SENT}}, **without)
    write_run(tmp_path, repeat=1, status="unavailable", reason="no GPU", **without)
    write_run(tmp_path, repeat=2, gpus=2, status="oom")
    reference, failed = (row_of(rows_of(tmp_path), status=status) for status in ("ok", "oom"))
    assert (reference["runs_ok"], reference["attempts_failed"], failed["attempts_failed"]) == (1, 1, 1)
    assert list(tables_of(tmp_path).runs["reference"].dropna()) == [NOTHING_SENT] * 2


def test_a_failure_is_counted_where_another_attempt_succeeded(tmp_path):
    write_run(tmp_path, attempt=1, status="timeout", reason="no answer")
    write_run(tmp_path, attempt=2)
    (row,) = rows_of(tmp_path)
    assert (row["status"], row["reason"], row["runs_ok"], row["attempts_failed"]) == ("ok", None, 1, 1)


def test_the_reason_of_the_last_attempt_is_shown_where_none_succeeded(tmp_path):
    times = {"times": {"start": "2026-02-01T10:00:00+00:00"}}
    write_run(tmp_path, attempt=2, status="error", reason="first")
    write_run(tmp_path, attempt=1, repeat=1, status="oom", reason="second", sections=times)
    (row,) = rows_of(tmp_path)
    assert (row["status"], row["reason"], row["attempts_failed"]) == ("oom", "second", 2)


def test_the_median_is_of_seconds_not_of_rates(tmp_path):
    write_repeats(tmp_path, 100.0, 50.0)
    (row,) = rows_of(tmp_path)
    # (10 ms + 20 ms) / 2 = 15 ms a sample; the mean of the rates would be 75
    assert row["throughput_samples_per_s"] == pytest.approx(1 / 0.015)
    assert row["model_flops_per_s_per_gpu"] == pytest.approx(2e9 / 0.015)
    assert row["mfu"] == pytest.approx(2e9 / 0.015 / 1e12), "over a peak of 1e12, from merged seconds"


def test_merged_rates_come_from_merged_seconds(tmp_path):
    model = {"flops_per_sample": 2e9, "hardware_flops_per_sample": 2.5e9}
    for repeat, (rate, steady) in enumerate(((100.0, 110.0), (50.0, 80.0), (90.0, 20.0), (80.0, 100.0))):
        summary = {"throughput_steady_samples_per_s": steady, "hfu": 0.0025 * rate}
        write_run(tmp_path, rate=rate, repeat=repeat, summary=summary, sections={"model": model})
    (row,) = rows_of(tmp_path)
    assert row["throughput_steady_samples_per_s"] == pytest.approx(1 / ((1 / 100 + 1 / 80) / 2))
    assert row["throughput_samples_per_s"] == pytest.approx(1 / ((1 / 90 + 1 / 80) / 2))
    assert row["hfu"] == pytest.approx(row["mfu"] * 2.5 / 2)


def test_seven_repeats_all_count(tmp_path):
    write_repeats(tmp_path, *(1e3 / ms for ms in (10.0, 11.0, 12.0, 14.0, 20.0, 30.0, 90.0)))
    (row,) = rows_of(tmp_path)
    ends = ("", "low_", "high_", "shortest_", "longest_")
    assert [row[f"sample_time_{end}s"] for end in ends] == pytest.approx([0.014, 0.01, 0.09, 0.01, 0.09])
    assert [row[f"epoch_time_{end}s"] for end in ends] == pytest.approx([14.336, 10.24, 92.16, 10.24, 92.16])
    assert row["interval"] == "n=7, 98.4 % CI"


def test_a_run_without_a_rate_is_not_in_the_count_of_the_interval(tmp_path):
    write_repeats(tmp_path, *(100.0 + repeat for repeat in range(6)))
    write_run(tmp_path, repeat=6, summary={"throughput_samples_per_s": None})
    write_run(tmp_path, repeat=7, status="killed")
    (row,) = rows_of(tmp_path)
    assert (row["interval"], row["runs_ok"], row["attempts_failed"]) == ("n=6, 96.9 % CI", 7, 1)


SLOW = [1e3 / ms for ms in (10.0, 10.5, 10.8, 11.2, 12.0, 12.5)]  # samples a second; the median is 11 ms
FAST = [1e3 / ms for ms in (4.0, 5.0, 5.9, 6.1, 7.0, 8.0)]  # 6 ms
RATIOS = ("speedup", "efficiency")


@pytest.mark.parametrize(
    ("base", "gpus", "suffix", "other"),
    [({"framework": "single"}, 4, "", "_vs_own_base"), ({"gpus": 2}, 8, "_vs_own_base", "")],
    ids=["best single GPU", "own base of two"],
)
def test_the_interval_of_a_ratio_by_hand(tmp_path, base, gpus, suffix, other):
    """Seconds a sample of the base: 10 to 12.5 ms (median 11); of four times its GPUs: 4 to 8 ms (median 6)."""
    write_repeats(tmp_path, *SLOW, **base)
    write_repeats(tmp_path, *FAST, gpus=gpus)
    first, row = rows_of(tmp_path)
    speedup, efficiency = ([row[f"{name}{suffix}{end}"] for end in ("", "_low", "_high")] for name in RATIOS)
    assert speedup == pytest.approx([11 / 6, 10 / 8, 12.5 / 4])
    assert efficiency == pytest.approx([11 / 24, 10 / 32, 12.5 / 16])
    assert row[f"speedup{suffix}_coverage"] == pytest.approx(0.9375), "1 - 2 (1 - 0.96875)"
    assert row[f"speedup{suffix}_verdict"] == "speedup"
    assert row[f"{'best_single' if not suffix else 'own_base'}_epoch_time_s"] == pytest.approx(11.264), "1024 samples"
    assert (first[f"speedup{suffix}"], first[f"speedup{suffix}_low"]) == (1.0, None), "itself: 1 by definition"
    assert row[f"speedup{other}_low"] is None, "there is no other base"


def test_an_interval_that_touches_1_shows_no_speedup(tmp_path):
    write_repeats(tmp_path, *[100.0] * 6, framework="single")
    write_repeats(tmp_path, *(100.0 + 10 * repeat for repeat in range(6)))
    row = row_of(rows_of(tmp_path), framework="single")
    assert (row["speedup"], row["speedup_high"]) == (pytest.approx(1 / 1.25, abs=0.01), pytest.approx(1.0))
    assert row["speedup_verdict"] == "no speedup shown"


# Columns of scaling.csv that merge repeats, in which three of them differ.
MEDIANS = (
    "step_time_median_s", "data_wait_share", "validation_time_s", "val_loss", "val_top1", "val_top5",
    "val_perplexity_token", "val_perplexity_word", "epoch_first_step_s", "host_wait_share", "energy_epoch_j",
    "energy_sample_j", "power_mean_w", "cpu_share", "read_bytes_per_s", "data_wait_mean_share", "sent_step_bytes",
)  # fmt: skip
LARGEST = (
    "memory_allocated_peak_bytes", "memory_reserved_peak_bytes", "memory_device_peak_bytes", "memory_host_peak_bytes",
    "allocator_retries",
)  # fmt: skip
OF_THE_FRAMEWORK = ("bubble", "bubble_theoretical", "staleness", "staleness_theoretical")


def test_every_merged_column_over_three_repeats_and_a_failed_run(tmp_path):
    """1, 2 and 10 have the median 2 and the mean 4.3; the run that failed has the largest value of all."""
    for repeat, (status, value) in enumerate((("ok", 10), ("ok", 1), ("ok", 2), ("killed", 99))):
        summary = {
            name: value / 10 if name.endswith(("share", "top1", "top5")) else value for name in MEDIANS + LARGEST
        }
        framework = {name: value / 10 if "bubble" in name else value for name in OF_THE_FRAMEWORK}
        sections = {"framework": framework} | ({"summary": summary} if status == "killed" else {})
        write_run(tmp_path, gpus=2, repeat=repeat, status=status, summary=summary, sections=sections)
    (row,) = rows_of(tmp_path)
    shares = [name for name in MEDIANS if name.endswith(("share", "top1", "top5"))]
    assert {name: row[name] for name in MEDIANS} == {name: 0.2 if name in shares else 2 for name in MEDIANS}
    assert {name: row[name] for name in LARGEST} == dict.fromkeys(LARGEST, 10)
    assert (row["bubble"], row["bubble_theoretical"]) == (0.2, 0.2)
    assert (row["staleness_max"], row["staleness_theoretical_max"]) == (10, 10)
    others = {"epoch_time_s", "bubble", "bubble_theoretical", "staleness_max", "staleness_theoretical_max"}
    others |= {"time_to_train_s"}  # tests/results/tables/test_published_rows.py
    assert {column.name for column in SCALING if column.source in ("median", "max")} == {*MEDIANS, *LARGEST} | others


def own_step(source, seconds):
    return {"own_step_source": source, "own_step_s": seconds, "own_step_median_rank_s": seconds / 2}


def test_own_steps_of_a_window_and_of_a_thread_have_no_common_median(tmp_path):
    """Three of a thread have the median 2; where one repeat has a window, that counts alone."""
    names = ("own_step_source", "own_step_s", "own_step_median_rank_s")
    for repeat in range(3):
        write_run(tmp_path, gpus=2, repeat=repeat, summary=own_step("thread", repeat + 1.0))
    (row,) = rows_of(tmp_path)
    assert [row[name] for name in names] == ["thread", 2.0, 1.0]
    write_run(tmp_path, gpus=2, repeat=3, summary=own_step("window", 8.0))
    (row,) = rows_of(tmp_path)
    assert [row[name] for name in names] == ["window", 8.0, 4.0]


def test_the_peak_behind_mfu_and_the_source_of_the_energy_are_those_of_any_repeat(tmp_path):
    """The summary of the first repeat contradicts its epochs and is left out."""
    model = {"model": {"flops_per_sample": 2e9, "hardware_flops_per_sample": 3e9}}
    energy = {"energy_source": "nvml", "energy_sample_j": 2.0}
    write_run(tmp_path, repeat=0, summary=energy | {"epochs_done": 9}, sections=model)
    write_run(tmp_path, repeat=1, summary=energy, sections=model)
    (row,) = rows_of(tmp_path)
    assert (row["mfu"], row["hfu"]) == (pytest.approx(2e9 * 100 / 1e12), pytest.approx(3e9 * 100 / 1e12))
    assert (row["energy_source"], row["energy_sample_j"]) == ("nvml", 2.0)


def test_no_speedup_is_shown_where_the_interval_includes_1(tmp_path):
    for framework, rate in (("single", 100.0), ("ddp", 95.0), ("fsdp", 80.0)):
        write_repeats(tmp_path, *(rate + repeat for repeat in range(6)), framework=framework)
    rows = rows_of(tmp_path)
    assert row_of(rows, framework="ddp")["speedup_verdict"] == "no speedup shown"
    assert row_of(rows, framework="fsdp")["speedup_verdict"] == "slowdown"


def test_no_verdict_over_a_base_on_another_cluster(tmp_path):
    """Two GPUs of west over one of east; the same two over one of west."""
    write_repeats(tmp_path, *[100.0] * 6, cluster="east")
    write_repeats(tmp_path, *[150.0] * 6, gpus=2, cluster="west")
    two = row_of(rows_of(tmp_path), gpus=2)
    assert [two[f"speedup{end}"] for end in ("", "_low", "_verdict")] == [pytest.approx(1.5), pytest.approx(1.5), None]
    assert (two["own_base_gpus"], two["speedup_vs_own_base"]) == (2, 1.0)
    assert two["best_single_across"] == "cluster=east"
    write_repeats(tmp_path, *[110.0] * 6, cluster="west")
    two = row_of(rows_of(tmp_path), gpus=2)
    assert two["best_single_across"] is None
    assert (two["speedup_verdict"], two["own_base_gpus"]) == ("speedup", 1)
    assert two["speedup_vs_own_base"] == pytest.approx(150 / 110)


def test_a_cap_on_the_steps_does_not_change_the_speedup(tmp_path):
    """Weak scaling, 5 steps an epoch: the epoch of two GPUs holds twice the samples and takes as long."""
    for gpus in (1, 2):
        write_run(tmp_path, gpus=gpus, rate=90.0 * gpus, train={"steps": 5}, summary={"epoch_time_s": 1.7})
    two = row_of(rows_of(tmp_path), gpus=2)
    assert two["epoch_time_s"] == two["own_base_epoch_time_s"]
    assert two["speedup_vs_own_base"] == pytest.approx(2.0)
    assert two["efficiency_vs_own_base"] == pytest.approx(1.0)


def test_one_point_in_both_kinds_has_a_row_in_each(tmp_path):
    write_run(tmp_path, gpus=1, rate=100.0, per_gpu=None, global_batch=32)
    write_run(tmp_path, gpus=2, rate=160.0, per_gpu=None, global_batch=32)
    write_run(tmp_path, gpus=2, rate=190.0, per_gpu=None, global_batch=64)
    rows = rows_of(tmp_path)
    assert sorted((row["gpus"], row["global_batch"], row["scaling"]) for row in rows) == [
        (1, 32, "strong"),
        (1, 32, "weak"),
        (2, 32, "strong"),
        (2, 64, "weak"),
    ]
    assert row_of(rows, gpus=2, scaling="strong")["speedup_vs_own_base"] == pytest.approx(1.6)
    assert row_of(rows, gpus=2, scaling="weak")["speedup_vs_own_base"] == pytest.approx(1.9)


def test_layouts_of_one_framework_share_a_base(tmp_path):
    """Tensor parallel on 2 and 4: the layout differs along the curve; the base is the fastest on the fewest."""
    write_run(tmp_path, framework="tp", gpus=2, rate=50.0, knobs={"dp": 2, "tp": 1})
    write_run(tmp_path, framework="tp", gpus=2, rate=60.0, knobs={"dp": 1, "tp": 2})
    write_run(tmp_path, framework="tp", gpus=4, rate=90.0, knobs={"dp": 1, "tp": 4})
    rows = rows_of(tmp_path)
    four = row_of(rows, gpus=4)
    assert (four["layout"], four["knobs"]) == ("dp=1 tp=4", None)
    assert four["speedup_vs_own_base"] == pytest.approx(1.5)
    assert four["efficiency_vs_own_base"] == pytest.approx(0.75)


def test_other_settings_that_differ_are_shown(tmp_path):
    write_run(tmp_path, train={"compile": True})
    write_run(tmp_path, train={"compile": False})
    assert [row["variant"] for row in rows_of(tmp_path)] == ["train.compile=false", "train.compile=true"]


def test_loaders_are_one_comparison_by_loader(tmp_path):
    """Native and DALI under ddp and fsdp on 1 and 2 GPUs."""
    for framework, factor in (("ddp", 1.0), ("fsdp", 0.5)):
        for loader, rate in (("native", 100.0), ("dali", 160.0)):
            for gpus in (1, 2):
                write_run(tmp_path, framework=framework, loader=loader, gpus=gpus, rate=rate * factor * gpus**0.5)
    assert {(row["compared_by"], row["compared"]) for row in rows_of(tmp_path)} == {
        ("framework", "ddp"), ("framework", "fsdp"),
    }  # fmt: skip
    rows = records(tables_of(tmp_path, by="loader").scaling)
    by_framework = {name: {row["comparison"] for row in rows if row["framework"] == name} for name in ("ddp", "fsdp")}
    assert [len(ids) for ids in by_framework.values()] == [1, 1]
    assert by_framework["ddp"].isdisjoint(by_framework["fsdp"])
    two = row_of(rows, framework="fsdp", loader="native", gpus=2)
    assert (two["compared_by"], two["compared"]) == ("loader", "native")
    assert two["best_single_sample_time_s"] == pytest.approx(1 / 80), "fsdp with dali"
    assert (two["best_single_framework"], two["best_single_compared"]) == ("fsdp", "dali")
    assert two["speedup"] == pytest.approx(50 * 2**0.5 / 80)
    assert two["speedup_vs_own_base"] == pytest.approx(2**0.5), "fsdp with native"


def test_settings_of_a_loader_name_its_curves_by_loader(tmp_path):
    for workers in (2, 8):
        with edited(write_run(tmp_path, train={"steps": workers})) as record:
            record["config"]["loader"]["workers"] = workers
            record["config"]["train"]["steps"] = None
    result = tables_of(tmp_path, by="loader").scaling
    assert list(result["knobs"]) == ["workers=2", "workers=8"]
    assert result["variant"].isna().all()
