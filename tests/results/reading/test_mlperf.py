"""Folders of MLPerf Training results become runs: seconds by hand, and logs that contradict themselves."""

from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.results.reading.mlperf import Log, read_results
from tests.support.published import START_MS, URL, event, events, log_text, system, write_results


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
    epochs = log(without(events(), "epoch_start", "epoch_stop")).epochs()
    assert [epoch["epoch_time_s"] for epoch in epochs] == [102.0, 102.0, 100.0, 100.0]
    assert [epoch.get("val_top1") for epoch in epochs] == [None, 0.5, None, 0.6]


def test_epochs_are_read_without_blocks():
    epochs = log(without(events(), "block_start", "block_stop")).epochs()
    assert [epoch["epoch_time_s"] for epoch in epochs] == [104.0, 100.0, 100.0, 100.0]


def test_an_evaluation_within_an_epoch_is_no_part_of_its_time():
    """Each of the two epochs of 100 s ends with an evaluation of 10 s."""
    listed = [event(0, "run_start")]
    for number in (1, 2):
        numbered, begin = {"epoch_num": number}, 100_000 * (number - 1)
        times = {"epoch_start": 0, "eval_start": 90_000, "eval_stop": 100_000, "epoch_stop": 100_000}
        listed += [event(begin + ms, key, **numbered) for key, ms in times.items()]
    epochs = log([*listed, event(200_000, "run_stop", status="success")]).epochs()
    assert [(epoch["epoch_time_s"], epoch["validation_time_s"]) for epoch in epochs] == [(90.0, 10.0)] * 2
    assert [epoch["elapsed_s"] for epoch in epochs] == [100.0, 200.0]


def test_output_of_another_process_in_front_of_a_line_is_left_out():
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
def test_a_line_that_is_no_event_is_named(line):
    with pytest.raises(ValueError, match="line 1 "):
        Log(b":::MLLOG " + line + b"\n" + log_text(events()).encode())


@pytest.mark.parametrize("value", [None, "512", 0, -1, 1.5, True])
def test_counts_are_whole_numbers_above_0(value):
    with pytest.raises(ValueError, match="global_batch_size is"):
        log(changed("global_batch_size", value=value)).count("global_batch_size")


ADDRESS = (None, f"{URL}/", "horovod")


def left_out(folder):
    """Why a folder with one log has no run."""
    runs, (line,) = read_results(folder, *ADDRESS)
    assert runs == []
    return line


def test_a_run_has_what_log_and_system_state(tmp_path):
    write_results(tmp_path / "2xExample", events(), events(top1=0.52))
    (one, two), not_read = read_results(tmp_path, *ADDRESS)
    assert not_read == []
    assert (one["source"], one["model"]) == ("MLPerf Training 2020, Example", "ResNet-50 v1.5")
    assert one["url"] == f"{URL}/2xExample"
    assert (one["gpus"], one["nodes"], one["gpu_type"], one["global_batch"]) == (8, 2, "NVIDIA A100-SXM4-40GB", 512)
    assert (one["repeat"], two["repeat"], one["seed"], one["recipe"]) == (0, 1, 7, "lars")
    assert one["sample_time_s"] == pytest.approx(300 / (3 * 51_200)), "epoch 0 is no part of it"
    assert one["summary"] | {"epoch_time_max_s": 100.0} == {
        "epochs_done": 4, "epochs_measured": 3, "epoch_time_s": 100.0, "epoch_time_min_s": 100.0,
        "epoch_time_max_s": 100.0, "validation_time_s": 2.0, "val_top1": 0.6,
    }  # fmt: skip
    assert one["more"]["time_to_train_s"] == 409.0
    assert one["more"]["system"]["host_networking"] == "2x HDR"
    assert "accelerator_frequency" not in one["more"]["system"], "N/A states nothing"
    assert [line["elapsed_s"] for line in one["epochs"]] == [104.0, 206.0, 306.0, 408.0]
    assert [line["warmup"] for line in one["epochs"]] == [True, False, False, False]


def test_the_system_of_a_submission(tmp_path):
    folder = write_results(tmp_path / "Org" / "results" / "2xExample" / "resnet")
    (tmp_path / "Org" / "systems").mkdir()
    (folder / "system.json").rename(tmp_path / "Org" / "systems" / "2xExample.json")
    (run,), _ = read_results(folder, *ADDRESS)
    assert (run["gpus"], run["url"]) == (8, URL)


def test_accuracies_of_other_benchmarks_are_no_top1(tmp_path):
    write_results(tmp_path / "a", changed("submission_benchmark", value="ssd"))
    (run,), _ = read_results(tmp_path, *ADDRESS)
    assert (run["model"], run["summary"]["val_top1"]) == ("ssd", None)


def test_benchmarks_that_do_not_count_by_epochs(tmp_path):
    write_results(tmp_path / "a", changed("submission_benchmark", value="bert"))
    assert "an epoch of benchmark 'bert' is no pass over its training samples" in left_out(tmp_path)


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"accelerator_model_name": "TPU-v4"}, "unknown GPU 'TPU-v4'"),
        ({"accelerator_model_name": None}, "unknown GPU 'None'"),
        ({"accelerators_per_node": "0"}, "accelerators_per_node of its system is '0': unknown number of GPUs"),
        ({"number_of_nodes": "N/A"}, "number_of_nodes of its system is 'N/A'"),
        ({"number_of_nodes": "9" * 400}, "number_of_nodes of its system is"),
    ],
)
def test_a_system_whose_gpus_are_unknown_is_left_out(tmp_path, described, reason):
    write_results(tmp_path / "a", **described)
    assert reason in left_out(tmp_path)


def test_a_broken_log_leaves_its_repeats(tmp_path):
    folder = write_results(tmp_path / "a", events(), events())
    (folder / "result_0.txt").write_bytes(b":::MLLOG {\xff\x00\n")
    (run,), (line,) = read_results(tmp_path, *ADDRESS)
    assert run["repeat"] == 1
    assert line.startswith(f"{folder / 'result_0.txt'}: line 1 is not JSON")


def test_a_missing_system_or_log_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no result_0\.txt"):
        read_results(tmp_path, *ADDRESS)
    (tmp_path / "result_0.txt").write_text(log_text(events()))
    assert "no description of its system: put it beside the log" in left_out(tmp_path)


def test_texts_of_a_system_are_short_and_printable(tmp_path):
    write_results(tmp_path / "a", host_networking="\x1b[2J" + "x" * 9_000, system_name="a" * 300)
    (run,), _ = read_results(tmp_path, *ADDRESS)
    assert run["more"]["network"].startswith("\\x1b[2Jxxx")
    assert max(map(len, run["more"]["system"].values())) <= 200
    assert system()["system_name"] == "2xExample"
