"""Folders of MLPerf Training results become runs."""

from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.results.reading.mlperf import read_results
from tests.support.published import URL, events, log_text, system, write_results

ADDRESS = (None, f"{URL}/", "horovod")


def test_a_run_has_what_log_and_system_state(tmp_path):
    write_results(tmp_path / "2xExample", events(), events(top1=0.52))
    (one, two), left_out = read_results(tmp_path, *ADDRESS)
    assert left_out == []
    assert (one["source"], one["url"], one["model"]) == (
        "MLPerf Training 2020, Example",
        f"{URL}/2xExample",
        "ResNet-50 v1.5",
    )
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
    listed = events()
    listed[0]["value"] = "ssd"
    write_results(tmp_path / "a", listed)
    (run,), _ = read_results(tmp_path, *ADDRESS)
    assert run["model"] == "ssd"
    assert run["summary"]["val_top1"] is None


def test_benchmarks_that_do_not_count_by_epochs(tmp_path):
    listed = events()
    listed[0]["value"] = "bert"
    write_results(tmp_path / "a", listed)
    runs, (line,) = read_results(tmp_path, *ADDRESS)
    assert runs == []
    assert "an epoch of benchmark 'bert' is no pass over its training samples" in line


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
def test_a_system_whose_gpus_are_unknown(tmp_path, described, reason):
    write_results(tmp_path / "a", **described)
    runs, (line,) = read_results(tmp_path, *ADDRESS)
    assert runs == []
    assert reason in line


def test_a_broken_log_leaves_its_repeats(tmp_path):
    folder = write_results(tmp_path / "a", events(), events())
    (folder / "result_0.txt").write_bytes(b":::MLLOG {\xff\x00\n")
    (run,), (line,) = read_results(tmp_path, *ADDRESS)
    assert run["repeat"] == 1
    assert line.startswith(f"{folder / 'result_0.txt'}: line 1 is not JSON")


def test_without_a_system_or_a_log(tmp_path):
    with pytest.raises(UserError, match=r"has no result_0\.txt"):
        read_results(tmp_path, *ADDRESS)
    (tmp_path / "result_0.txt").write_text(log_text(events()))
    runs, (line,) = read_results(tmp_path, *ADDRESS)
    assert runs == []
    assert "no description of its system: put it beside the log" in line


def test_texts_of_a_system_are_short_and_printable(tmp_path):
    write_results(tmp_path / "a", host_networking="\x1b[2J" + "x" * 9_000, system_name="a" * 300)
    (run,), _ = read_results(tmp_path, *ADDRESS)
    assert run["more"]["network"].startswith("\\x1b[2Jxxx")
    assert max(map(len, run["more"]["system"].values())) <= 200
    assert system()["system_name"] == "2xExample"
