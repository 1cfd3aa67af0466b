"""Which framework is the fastest, in words: as certain as the repeats allow."""

from __future__ import annotations

import re
from itertools import product

from ddlbench.report.fastest import PARAGRAPHS, best, comparisons
from ddlbench.report.overview import base_lines, summary_text
from tests.support.records import tables_of, write_repeats, write_run


def paragraphs_of(results):
    return best(tables_of(results).measurements)


def said_of(results):
    """The sentences of the only model."""
    ((paragraph,), _) = paragraphs_of(results)
    return paragraph[1]


def repeats(results, rate, count=6, **others):
    write_repeats(results, *(rate + repeat for repeat in range(count)), **others)


def test_intervals_that_do_not_overlap_show_the_fastest(tmp_path):
    """10 to 12.5 ms against 20 to 40 ms: 20 / 12.5 = 1.6 to 40 / 10 = 4."""
    write_repeats(tmp_path, 100.0, 100.0, 90.0, 90.0, 80.0, 80.0, framework="single")
    write_repeats(tmp_path, 50.0, 50.0, 40.0, 40.0, 25.0, 25.0, framework="ddp")
    ((paragraph,), more) = paragraphs_of(tmp_path)
    assert (paragraph[0], more) == ("resnet50", 0)
    assert paragraph[1] == [
        "On 1 GPU: single is the fastest, 90 samples/s, 2.25 times as fast as ddp; "
        "the 95 % intervals do not overlap (n=6 and n=6)."
    ]
    assert sentences(tmp_path) == [
        "resnet50, one GPU count, 32 samples an update, 1 GPU: single is 2.25 times as fast as ddp: "
        "11.1 ms and 25.0 ms a sample, the ratio is 1.6 to 4"
    ]


def test_compared_models_are_one_paragraph(tmp_path):
    repeats(tmp_path, 200.0)
    repeats(tmp_path, 100.0, model="resnet101")
    ((paragraph,), _) = best(tables_of(tmp_path, by="model").measurements)
    assert paragraph[0] == "resnet101, resnet50"
    assert paragraph[1][0].startswith("On 1 GPU: resnet50 is the fastest, 202.5 samples/s, 1.98 times as fast")


def test_overlapping_intervals_show_no_difference(tmp_path):
    repeats(tmp_path, 101.0, framework="ddp")
    repeats(tmp_path, 100.0, framework="fsdp")
    repeats(tmp_path, 50.0, framework="zero1")
    (sentence,) = said_of(tmp_path)
    assert "ddp has the shortest median" in sentence
    assert "no difference is shown between ddp and fsdp (95 % interval 9.43 ms to 9.90 ms a sample)" in sentence
    assert ", 1 GPU: no difference shown between ddp and fsdp: " in sentences(tmp_path)[0]


def test_a_framework_with_other_updates_is_named_so(tmp_path):
    repeats(tmp_path, 101.0, framework="pipedream", sections={"framework": {"name": "pipedream", "staleness": [1, 0]}})
    repeats(tmp_path, 100.0, framework="ddp")
    (sentence,) = said_of(tmp_path)
    assert sentence.startswith("On 1 GPU: pipedream (other updates) has the shortest median time")
    assert "no difference is shown between pipedream (other updates) and ddp (95 %" in sentence


def test_one_of_three_without_an_interval_is_not_said_to_be_slower(tmp_path):
    repeats(tmp_path, 200.0, framework="ddp")
    repeats(tmp_path, 100.0, framework="fsdp")
    repeats(tmp_path, 50.0, count=2, framework="zero1")
    assert said_of(tmp_path) == [
        "On 1 GPU: ddp has the shortest median time, 4.94 ms a sample (202.5 samples/s), 1.98 times as fast as fsdp; "
        "no difference is shown between ddp and zero1 (95 % interval 4.88 ms to 5.00 ms a sample)."
    ]


def test_a_framework_without_a_rival_is_the_only_one_with_a_result(tmp_path):
    repeats(tmp_path, 200.0, count=1, framework="ddp", gpus=2)
    write_run(tmp_path, framework="fsdp", gpus=2, status="oom")
    write_run(tmp_path, framework="fsdp", gpus=4, status="oom")
    assert said_of(tmp_path) == [
        "On 2 GPUs, 64 samples an update: ddp is the only one with a result, 200 samples/s (n=1)."
    ]


def test_large_rates_and_speedups_have_no_exponent(tmp_path):
    write_repeats(tmp_path, *[400.0] * 6)
    write_repeats(tmp_path, *[480_000.0] * 6, gpus=2048)
    assert said_of(tmp_path)[1].endswith("ddp is the only one with a result, 480,000 samples/s (n=6).")
    assert sentences(tmp_path)[0].endswith("against ddp on 1 GPU: ddp is 1,200 times as fast (1,200 to 1,200)")


def test_a_reference_is_called_neither_the_fastest_nor_the_only_result(tmp_path):
    repeats(tmp_path, 100.0, gpus=2)
    without = {"sections": {"framework": {"reference": "gradients are not sent"}}, "knobs": {"comm_hook": "noop"}}
    repeats(tmp_path, 400.0, gpus=2, **without)
    repeats(tmp_path, 200.0, gpus=2, loader="dali", **without)
    assert said_of(tmp_path) == ["On 2 GPUs: ddp is the only one with a result, 102.5 samples/s (n=6)."]
    assert sentences(tmp_path) == []


def test_many_models_are_counted(tmp_path):
    for number in range(PARAGRAPHS + 2):
        write_run(tmp_path, model=f"model{number}")
    paragraphs, more = paragraphs_of(tmp_path)
    assert (len(paragraphs), more) == (PARAGRAPHS, 2)


def sentences(results):
    return comparisons(tables_of(results).measurements)


def test_frameworks_on_equal_gpus_are_one_sentence_and_the_base_is_another(tmp_path):
    write_repeats(tmp_path, *[100.0] * 6, framework="single")
    for framework, rates in (("ddp", [180.0] * 6), ("fsdp", [150.0] * 6), ("zero1", [95.0] * 5 + [105.0])):
        write_repeats(tmp_path, *rates, framework=framework, gpus=2)
    place, base, count = sentences(tmp_path)
    where = "resnet50, weak scaling, 32 samples a GPU, 2 GPUs"
    assert place == (
        f"{where}: ddp is 1.2 times as fast as fsdp: 5.56 ms and 6.67 ms a sample, the ratio is 1.2 to 1.2; "
        "ddp is 1.89 times as fast as zero1: 5.56 ms and 10.5 ms a sample, the ratio is 1.71 to 1.89"
    )
    assert base == (
        f"{where}, against single on 1 GPU: ddp is 1.8 times as fast (1.8 to 1.8); "
        "fsdp is 1.5 times as fast (1.5 to 1.5); zero1: no speedup shown (0.95 to 1.05)"
    )
    assert count == (
        "5 comparisons with intervals, not corrected for their number: each is wrong with probability 10 % at most, "
        "so by chance up to about 0.5 of them"
    )


def test_only_comparable_rows_are_compared(tmp_path):
    write_run(tmp_path, gpus=1)
    write_run(tmp_path, gpus=2)
    write_run(tmp_path, gpus=1, dataset="b" * 64, framework="single")
    write_run(tmp_path, gpus=1, status="oom", framework="fsdp")
    assert sentences(tmp_path) == []


def test_a_comparison_in_strong_and_in_weak_scaling_counts_once(tmp_path):
    """ddp and fsdp on 2 GPUs are in both; on 1 GPU in weak scaling and on 4 GPUs in strong scaling alone."""
    for framework, rate in (("ddp", 100.0), ("fsdp", 80.0)):
        for gpus, batch in ((1, 32), (2, 64), (4, 64)):
            write_repeats(
                tmp_path, *[rate * gpus] * 6, framework=framework, gpus=gpus, per_gpu=None, global_batch=batch
            )
    *said, count = sentences(tmp_path)
    assert sum(", 2 GPUs: ddp is 1.25 times as fast as fsdp" in sentence for sentence in said) == 2
    assert count.startswith("5 comparisons with intervals")  # of 3 GPU counts, and of 2 rows on 2 GPUs with their base


def test_rows_with_equal_batches_are_judged_though_one_has_no_other_gpu_count(tmp_path):
    """With --across scaling ddp has strong scaling, and fsdp one GPU count."""
    for framework, gpus, rate in (("ddp", 2, 100.0), ("ddp", 4, 200.0), ("fsdp", 4, 100.0)):
        write_repeats(tmp_path, *[rate] * 6, framework=framework, gpus=gpus, per_gpu=None, global_batch=64)
    measurements = tables_of(tmp_path, across=["scaling"]).measurements
    ((paragraph,), _) = best(measurements)
    assert "On 4 GPUs: ddp (strong) is the fastest, 200 samples/s, 2 times as fast as fsdp (single)" in paragraph[1][1]
    assert "ddp (strong) is 2 times as fast as fsdp (single)" in comparisons(measurements)[0]


def test_with_any_scaling_a_measurement_is_not_compared_with_itself(tmp_path):
    """Two GPUs are a point of strong scaling with 64 samples, and of weak scaling with 32 a GPU."""
    for gpus, batch, rate in ((1, 64, 100.0), (2, 64, 180.0), (1, 32, 95.0)):
        rates = [rate * (1 + repeat / 100) for repeat in range(6)]
        write_repeats(tmp_path, *rates, gpus=gpus, per_gpu=None, global_batch=batch)
    of_one, of_two = comparisons(tables_of(tmp_path, across=["scaling"]).measurements)
    assert "no verdict" in of_one
    assert of_two.endswith("2 GPUs, against ddp on 1 GPU: ddp (strong 64) is 1.8 times as fast (1.71 to 1.89)")


def on_nodes(results, rate, framework, nodes):
    launch = {"world_size": 8, "nodes": nodes, "device_type": "cuda"}
    for repeat in range(6):
        sections = {"launch": launch, "run_id": f"{framework}-{nodes}-{repeat}"}
        write_run(results / f"{nodes}", framework=framework, gpus=8, rate=rate, repeat=repeat, sections=sections)


def test_runs_on_other_numbers_of_nodes_are_not_judged_against_each_other(tmp_path):
    on_nodes(tmp_path, 200.0, "ddp", 1)
    on_nodes(tmp_path, 100.0, "ddp", 2)
    on_nodes(tmp_path, 50.0, "fsdp", 2)
    measurements = tables_of(tmp_path).measurements
    said = said_of(tmp_path)
    assert said[0] == "On 8 GPUs, 256 samples an update: ddp is the only one with a result, 200 samples/s (n=6)."
    assert said[1].startswith("On 8 GPUs of 2 nodes, 256 samples an update: ddp is the fastest, 100 samples/s, 2 times")
    (sentence,) = comparisons(measurements)
    assert sentence.startswith("resnet50, one GPU count, 256 samples an update, 8 GPUs of 2 nodes: ddp is 2 times")
    assert len({row.judged_with for row in measurements}) == 2


def test_repeats_with_another_name_of_the_cluster_are_named_and_not_judged(tmp_path):
    for cluster, rate in (("east", 200.0), ("west", 100.0)):
        write_repeats(tmp_path, *[rate] * 6, cluster=cluster)
    measurements = tables_of(tmp_path).measurements
    assert sorted(row.other_settings for row in measurements) == ["cluster=east", "cluster=west"]
    ((paragraph,), _) = best(measurements)
    assert paragraph[1] == [
        "On 1 GPU: ddp at east has the shortest median time, 5.00 ms a sample (200 samples/s), 2 times as fast as ddp "
        "at west; no verdict, because they differ in more than the framework."
    ]
    assert "no verdict" in comparisons(measurements)[0]


def test_a_base_on_another_cluster_is_no_verdict_and_the_names_say_why(tmp_path):
    write_repeats(tmp_path, *[100.0] * 6, cluster="east")
    write_repeats(tmp_path, *[150.0] * 6, gpus=2, cluster="west")
    measurements = tables_of(tmp_path).measurements
    assert [row.other_settings for row in measurements] == ["cluster=east", "cluster=west"]
    base = "base ddp (cluster=east)@1, resnet50, 32 samples an update: 10.0 ms a sample, epoch 10.2 s"
    assert base_lines(measurements)[0] == base
    (sentence,) = comparisons(measurements)
    assert sentence.endswith("ddp at west: speedup 1.5 without a verdict, because they differ in more, (1.5 to 1.5)")


def test_the_fastest_is_that_of_the_rows_that_are_judged(tmp_path):
    """ddp at west is slower than both, but differs in more than the framework."""
    for cluster, framework, rate in (("east", "ddp", 200.0), ("east", "fsdp", 160.0), ("west", "ddp", 100.0)):
        write_repeats(tmp_path, *[rate] * 6, framework=framework, cluster=cluster)
    assert said_of(tmp_path) == [
        "On 1 GPU: ddp at east is the fastest of those that differ in the framework alone, 200 samples/s, 1.25 times "
        "as fast as fsdp at east; the 95 % intervals do not overlap (n=6 and n=6)."
    ]


def test_n_counts_the_runs_that_have_a_time(tmp_path):
    """The summary of one of the six contradicts its epochs and is left out."""
    repeats(tmp_path, 200.0, framework="ddp")
    repeats(tmp_path, 100.0, count=5, framework="fsdp")
    write_run(tmp_path, framework="fsdp", rate=105.0, repeat=5, summary={"epochs_done": 9})
    tables = tables_of(tmp_path)
    ((paragraph,), _) = best(tables.measurements)
    assert "but with n=6 and n=5 this is not certain: an interval needs 6 repeats" in paragraph[1][0]
    (sentence,) = comparisons(tables.measurements)
    assert "(n=6 and n=5, no 95 % CI)" in sentence
    assert "times as fast" not in sentence
    (row,) = [row for row in tables.scaling_rows if row["framework"] == "fsdp"]
    assert (row["runs_ok"], row["runs_timed"], row["interval"]) == (6, 5, "n=5, no 95 % CI")
    assert re.search(r"(?m)^fsdp +resnet50 +native +1 +single +ok +5 ", text := summary_text(tables.measurements))
    assert "n < 6: no 95 % CI" in text


def test_a_comparison_names_the_loader_where_there_are_several(tmp_path):
    for loader, gpus in product(("native", "synthetic"), (1, 2)):
        repeats(tmp_path, 100.0 * gpus, loader=loader, gpus=gpus)
    *places, _ = [sentence.partition(": ")[0] for sentence in comparisons(tables_of(tmp_path).measurements)]
    where = "weak scaling, 32 samples a GPU, 2 GPUs, against ddp on 1 GPU"
    assert places == [f"resnet50, native, {where}", f"resnet50, synthetic, {where}"]


def test_ranks_on_the_cpu_are_no_gpus(tmp_path):
    for framework in ("single", "ddp"):
        write_run(tmp_path, framework=framework, device="cpu")
    assert sentences(tmp_path)[0].startswith("resnet50, one rank count, 32 samples an update, 1 rank: ")
