"""Sentences on which is faster: only where the repeats allow one."""

from __future__ import annotations

from ddlbench.report.verdicts import comparisons
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables, records
from tests.support.records import write_run


def sentences(results):
    return comparisons(records(make_tables(read_all([results])).scaling))


def repeats(results, framework, rates):
    for repeat, rate in enumerate(rates):
        write_run(results, framework=framework, rate=rate, repeat=repeat)


def test_too_few_repeats_conclude_nothing(tmp_path):
    repeats(tmp_path, "single", [100.0] * 6)
    repeats(tmp_path, "ddp", [50.0] * 3)
    (sentence,) = sentences(tmp_path)
    assert "n=6 and n=3, no 95 % CI" in sentence
    assert "times as fast" not in sentence


def test_overlapping_intervals_show_no_difference(tmp_path):
    repeats(tmp_path, "single", [100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    repeats(tmp_path, "ddp", [96.0, 97.0, 98.0, 99.0, 100.0, 101.0])
    (sentence,) = sentences(tmp_path)
    assert "no difference shown between single and ddp" in sentence


def test_separate_intervals_give_the_size_of_the_effect(tmp_path):
    repeats(tmp_path, "single", [200.0] * 6)
    repeats(tmp_path, "ddp", [160.0] * 6)
    (sentence,) = sentences(tmp_path)
    assert sentence.startswith("resnet50, one GPU count, 32 samples an update, 1 GPU: ")
    assert "single is 1.25 times as fast as ddp: 5.00 ms and 6.25 ms a sample" in sentence


def test_the_effect_has_a_range_by_hand(tmp_path):
    """10 to 12.5 ms against 20 to 40 ms: 20 / 12.5 = 1.6 to 40 / 10 = 4."""
    repeats(tmp_path, "single", [100.0, 100.0, 90.0, 90.0, 80.0, 80.0])
    repeats(tmp_path, "ddp", [50.0, 50.0, 40.0, 40.0, 25.0, 25.0])
    (sentence,) = sentences(tmp_path)
    assert sentence.endswith("the ratio is 1.6 to 4")


def test_frameworks_on_equal_gpus_are_one_sentence_and_the_base_is_another(tmp_path):
    repeats(tmp_path, "single", [100.0] * 6)
    for framework, rates in (("ddp", [180.0] * 6), ("fsdp", [150.0] * 6), ("zero1", [95.0] * 5 + [105.0])):
        for repeat, rate in enumerate(rates):
            write_run(tmp_path, framework=framework, gpus=2, rate=rate, repeat=repeat)
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
