"""Logs of MLPerf Training: seconds by hand, and logs that contradict themselves."""

from __future__ import annotations

import pytest

from ddlbench.results.reading.mlperf import Log
from tests.support.published import START_MS, event, events, log_text


def log(listed):
    return Log(log_text(listed).encode())


def without(listed, *keys):
    return [one for one in listed if one["key"] not in keys]


def test_time_to_train_and_epochs_by_hand():
    made = log(events())
    assert made.run.ms == 1_000 + 404_000 + 2 * 2_000  # run_start, four epochs, two evaluations
    keys = ("epoch_time_s", "validation_time_s", "val_top1")
    assert [tuple(map(line.get, keys)) for line in made.epochs()] == [
        (104.0, None, None),
        (100.0, 2.0, 0.5),
        (100.0, None, None),
        (100.0, 2.0, 0.6),
    ]


def test_blocks_alone_give_equal_epochs_without_their_evaluations():
    made = log(without(events(), "epoch_start", "epoch_stop"))
    assert [epoch["epoch_time_s"] for epoch in made.epochs()] == [102.0, 102.0, 100.0, 100.0]
    assert [epoch.get("val_top1") for epoch in made.epochs()] == [None, 0.5, None, 0.6]


def test_epochs_without_blocks():
    made = log(without(events(), "block_start", "block_stop"))
    assert [epoch["epoch_time_s"] for epoch in made.epochs()] == [104.0, 100.0, 100.0, 100.0]


def test_output_of_another_process_in_front_of_a_line():
    text = log_text(events()).replace(':::MLLOG {"time_ms": 16', 'step 3 loss 2.1:::MLLOG {"time_ms": 16') + "done\n"
    assert len(Log(text.encode()).epochs()) == 4


def test_every_process_may_log_the_same_value():
    assert log([*events(), event(9, "global_batch_size", 512)]).count("global_batch_size") == 512
    with pytest.raises(ValueError, match="global_batch_size occurs 2 times"):
        log([*events(), event(9, "global_batch_size", 64)]).count("global_batch_size")


def changed(key, **values):
    """The events, with the first one of a key changed."""
    listed = events()
    next(one for one in listed if one["key"] == key).update(values)
    return listed


def late(key, ms):
    """The events, with the first one of a key later by `ms`."""
    time_ms = next(one for one in events() if one["key"] == key)["time_ms"]
    return changed(key, time_ms=time_ms + ms)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        (without(events(), "run_start"), "run_start occurs 0 times"),
        ([*events(), event(5, "run_start")], "run_start occurs 2 times"),
        (changed("run_stop", time_ms=START_MS), "run_stop is not after run_start"),
        (changed("run_stop", metadata={"status": "aborted"}), "run_stop has the status 'aborted'"),
        (changed("epoch_start", time_ms="1600000000000"), "broken time stamps: line 10 has"),
        (changed("epoch_start", time_ms=True), "broken time stamps: line 10 has"),
        (changed("epoch_start", time_ms=-5), "broken time stamps: line 10 has"),
        (late("epoch_stop", -200_000), "broken time stamps of epochs"),
        (late("epoch_stop", 900_000), "broken time stamps of epochs"),
        (changed("epoch_stop", metadata={"epoch_num": 9}), "epoch_start and epoch_stop are no pairs"),
        (changed("epoch_start", metadata={"epoch_num": "one"}), "epoch_start has epoch_num = 'one'"),
        (changed("epoch_start", metadata={"epoch_num": [1]}), "epoch_start has epoch_num = "),
        (changed("eval_accuracy", metadata={}), "eval_accuracy has epoch_num = None"),
        (changed("block_start", metadata={"first_epoch_num": 1, "epoch_count": -2}), "epoch_count = -2"),
        (changed("epoch_start", time_ms=10**16), "broken time stamps: line 10 has"),
        (without(events(), "block_start", "block_stop", "epoch_start", "epoch_stop"), "neither epochs nor blocks"),
        (
            late("epoch_start", 4_000),
            "epochs and blocks disagree by more than 1 %: the block of epoch 1 trained for 204.000 s",
        ),
    ],
)
def test_a_log_that_contradicts_itself(listed, reason):
    with pytest.raises(ValueError, match=reason):
        log(listed).epochs()


def test_epochs_and_blocks_may_differ_by_one_percent():
    assert log(late("epoch_start", 2_000)).epochs()[0]["epoch_time_s"] == 102.0  # of 204 s


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"key": "x"}', b'{"key": 3, "time_ms": 1}', b"[" * 9000])
def test_a_line_that_is_no_event(line):
    with pytest.raises(ValueError, match="line 1 "):
        Log(b":::MLLOG " + line + b"\n" + log_text(events()).encode())


@pytest.mark.parametrize("value", [None, "512", 0, -1, 1.5, True])
def test_counts_are_whole_numbers_above_0(value):
    with pytest.raises(ValueError, match="global_batch_size is"):
        log(changed("global_batch_size", value=value)).count("global_batch_size")
