"""Sentences on which is faster: only where the repeats allow one."""

from __future__ import annotations

from ddlbench.report.compare import comparisons
from ddlbench.report.read import read_all
from ddlbench.report.tables import make_tables, records
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


def test_apart_intervals_give_the_size_of_the_effect(tmp_path):
    repeats(tmp_path, "single", [200.0] * 6)
    repeats(tmp_path, "ddp", [160.0] * 6)
    (sentence,) = sentences(tmp_path)
    assert sentence.startswith("resnet50, one GPU count, 32 samples an update, 1 GPU: ")
    assert "single is 1.25 times as fast as ddp: 5.00 ms and 6.25 ms a sample" in sentence


def test_only_comparable_rows_are_compared(tmp_path):
    write_run(tmp_path, gpus=1)
    write_run(tmp_path, gpus=2)
    write_run(tmp_path, gpus=1, dataset="b" * 64, framework="single")
    write_run(tmp_path, gpus=1, status="oom", framework="fsdp")
    assert sentences(tmp_path) == []
