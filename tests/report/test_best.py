"""The summary in words: the fastest framework for each model and GPU count, and how certain that is."""

from __future__ import annotations

from ddlbench.report.best import PARAGRAPHS, best
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables, records
from tests.support.records import write_run


def paragraphs_of(results):
    return best(records(make_tables(read_all([results])).scaling))


def repeats(results, rate, count=6, **others):
    for repeat in range(count):
        write_run(results, rate=rate + repeat, repeat=repeat, **others)


def test_intervals_that_do_not_overlap(tmp_path):
    repeats(tmp_path, 200.0, framework="ddp")
    repeats(tmp_path, 100.0, framework="fsdp")
    ((paragraph,), more) = paragraphs_of(tmp_path)
    assert (paragraph.subject, more) == ("resnet50", 0)
    assert paragraph.sentences == [
        "On 1 GPU: ddp is the fastest, 202.5 samples/s, 1.98 times as fast as fsdp; "
        "the 95 % intervals do not overlap (n=6 and n=6)."
    ]


def test_compared_models_are_one_paragraph(tmp_path):
    repeats(tmp_path, 200.0)
    repeats(tmp_path, 100.0, model="resnet101")
    ((paragraph,), _) = best(records(make_tables(read_all([tmp_path]), by="model").scaling))
    assert paragraph.subject == "resnet101, resnet50"
    assert paragraph.sentences[0].startswith("On 1 GPU: resnet50 is the fastest, 202.5 samples/s, 1.98 times as fast")


def test_intervals_that_overlap(tmp_path):
    repeats(tmp_path, 101.0, framework="ddp")
    repeats(tmp_path, 100.0, framework="fsdp")
    repeats(tmp_path, 50.0, framework="zero1")
    ((paragraph,), _) = paragraphs_of(tmp_path)
    (sentence,) = paragraph.sentences
    assert "ddp has the shortest median" in sentence
    assert "no difference is shown between ddp and fsdp (95 % interval 9.43 ms to 9.90 ms a sample)" in sentence


def test_one_of_three_without_an_interval_is_not_said_to_be_slower(tmp_path):
    repeats(tmp_path, 200.0, framework="ddp")
    repeats(tmp_path, 100.0, framework="fsdp")
    repeats(tmp_path, 50.0, count=2, framework="zero1")
    ((paragraph,), _) = paragraphs_of(tmp_path)
    assert paragraph.sentences == [
        "On 1 GPU: ddp has the shortest median time, 4.94 ms a sample (202.5 samples/s), 1.98 times as fast as fsdp; "
        "no difference is shown between ddp and zero1 (95 % interval 4.88 ms to 5.00 ms a sample)."
    ]


def test_too_few_repeats(tmp_path):
    repeats(tmp_path, 200.0, framework="ddp")
    repeats(tmp_path, 100.0, count=3, framework="fsdp")
    ((paragraph,), _) = paragraphs_of(tmp_path)
    assert "but with n=6 and n=3 this is not certain: an interval needs 6 repeats" in paragraph.sentences[0]


def test_a_framework_without_a_rival_is_the_only_one_with_a_result(tmp_path):
    repeats(tmp_path, 200.0, count=1, framework="ddp", gpus=2)
    write_run(tmp_path, framework="fsdp", gpus=2, status="oom")
    write_run(tmp_path, framework="fsdp", gpus=4, status="oom")
    ((paragraph,), _) = paragraphs_of(tmp_path)
    assert paragraph.sentences == [
        "On 2 GPUs, 64 samples an update: ddp is the only one with a result, 200 samples/s (n=1)."
    ]


def test_many_models_are_counted(tmp_path):
    for number in range(PARAGRAPHS + 2):
        write_run(tmp_path, model=f"model{number}")
    paragraphs, more = paragraphs_of(tmp_path)
    assert (len(paragraphs), more) == (PARAGRAPHS, 2)
