from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.oracle.machine.machine import load
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.oracle.runs import Results
from ddlbench.results.tables.merge import AttemptRow
from tests.oracle.made import ABCI, by_one_step, record
from tests.support.records import write_run

WORDS = ("+framework=ddp", "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=16",
         "model.image_size=64", "train.batch_per_gpu=8")  # fmt: skip


@pytest.fixture(scope="module")
def config() -> Config:
    return configuration(*WORDS)


def results(*attempts: AttemptRow) -> Results:
    return Results(Path("results"), list(attempts))


def test_equal_runs_count_by_their_median(config: Config) -> None:
    result = results(*(record(config, 1, seconds) for seconds in (0.4, 0.5, 0.9))).computation(config, ABCI)
    assert result.step(8) == pytest.approx(0.5)
    assert result.basis == "ddp on one device (run-1)"


def test_the_run_with_the_nearest_micro_batch_counts(config: Config) -> None:
    """Not the last one: a step of one sample on an H100 waits for its host, and gave 150 ms for a measured 160."""

    def batch_of(batch: int, step_s: float) -> AttemptRow:
        ledger = {"global_batch": batch, "data_size": 1, "micro_batches": 1}
        return record(config, 1, step_s, ledger=ledger, summary={"throughput_samples_per_s": batch / step_s})

    there = results(batch_of(8, 0.5), batch_of(64, 3.0), batch_of(1, 0.2)).computation(config, ABCI)
    assert there.step(8) == pytest.approx(0.5)
    assert there.marks(8) == []


def test_of_equal_batches_a_run_with_the_asked_settings_counts(config: Config) -> None:
    """DeepSpeed's weights in 16 bits, for example, are a setting of the framework, and the last run had it."""
    settings = {**config.resolved, "framework": {**config.resolved["framework"], "static_graph": True}}
    there = results(record(config, 1, 0.5), record(config, 1, 0.9, config=settings))
    assert there.computation(config, ABCI).step(8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("base", "marks"),
    [("ddp", []), ("single", []), ("gpipe", ["ddp from a run of gpipe, with what gpipe itself takes"])],
)
def test_a_base_of_another_framework_carries_a_mark(config: Config, base: str, marks: list[str]) -> None:
    """`single` has nothing of its own; of any other framework the row says whose run it starts from."""
    settings = {**config.resolved, "framework": {**config.resolved["framework"], "name": base}}
    there = results(record(config, 1, 0.5, config=settings))
    row = predict(config, 1, Inputs(ABCI, lambda asked: there.computation(asked, ABCI)))
    assert row.basis == f"{base} on one device (run-1)"
    assert list(row.marks) == marks


def test_runs_of_another_version_carry_a_mark_and_are_not_mixed(config: Config) -> None:
    environment = {"gpu_model": "Tesla V100-SXM2-16GB"}
    runs = [record(config, 1, seconds, environment={**environment, "torch": version})
            for seconds, version in ((0.4, "2.11.0"), (0.6, "2.14.1"))]  # fmt: skip
    same, other = (Results(Path("results"), runs, version) for version in ("2.14.1", "2.13.0"))
    assert same.computation(config, ABCI).step(8) == pytest.approx(0.6)
    assert same.computation(config, ABCI).marks(8) == []
    assert other.computation(config, ABCI).marks(8) == ["runs with torch 2.14.1, not 2.13.0"]


def test_a_step_of_several_micro_batches_is_spread_over_them(config: Config) -> None:
    ledger = {"global_batch": 8, "data_size": 1, "micro_batches": 2}
    result = results(record(config, 1, 0.5, ledger=ledger)).computation(config, ABCI)
    assert result.step(4, micro_batches=2) == pytest.approx(0.5)
    assert result.marks(4) == []


@pytest.mark.parametrize("wait", [{"data_wait_share": 0.2}, {"data_wait_share": 0.7, "data_wait_mean_share": 0.2}])
def test_waiting_for_data_is_taken_off(config: Config, wait: dict[str, float]) -> None:
    summary = {"throughput_samples_per_s": 8 / 0.5, **wait}
    result = results(record(config, 1, 0.5, summary=summary)).computation(config, ABCI)
    assert result.step(8) == pytest.approx(0.4)


@pytest.mark.parametrize(("algorithm", "micro"), [("auto", 8), ("ring", 8), ("auto", 4)])
def test_a_few_devices_give_one_device_s_seconds(config: Config, algorithm: str, micro: int) -> None:
    """What one device with 0.25 s predicts for 8 leads back to 0.25 s, with one micro batch on each device or two."""
    machine, count = replace(ABCI, algorithm=algorithm), 8 // micro
    asked = replace(config, train=replace(config.train, micro_batch=micro))
    eight = by_one_step(asked, 8, machine, OneStep(0.25, 8, micro))
    assert eight.step_s is not None
    assert eight.comm_exposed_s
    ledger = {"global_batch": 64, "data_size": 8, "micro_batches": count}
    result = results(record(config, 8, eight.step_s, ledger=ledger)).computation(config, machine)
    assert result.step(micro, micro_batches=count) == pytest.approx(0.25)
    assert result.basis == "ddp on 8 devices (run-8)"


def test_a_base_whose_micro_batch_does_not_divide_the_samples_of_a_device() -> None:
    """24 samples in six micro batches of 4 over four stages: each device has 6 of them."""
    config = configuration("+framework=gpipe", *WORDS[1:-1], "train.global_batch=24", "train.micro_batch=4")
    four = by_one_step(config, 4, ABCI, OneStep(0.25, 24, 4))
    assert four.step_s is not None
    ledger = {"global_batch": 24, "data_size": 1, "micro_batches": 6}
    summary = {"throughput_samples_per_s": 24 / four.step_s}
    there = results(record(config, 4, four.step_s, ledger=ledger, summary=summary))
    result = predict(config, 4, Inputs(ABCI, lambda asked: there.computation(asked, ABCI)))
    assert result.step_s == pytest.approx(four.step_s)
    assert result.marks == ()


def test_a_run_on_several_devices_that_sent_another_type_is_no_base(config: Config) -> None:
    settings = {**config.resolved, "train": {**config.resolved["train"], "reduce_dtype": "fp16"}}
    with pytest.raises(UserError, match="has no complete run"):
        results(record(config, 8, 0.5, config=settings)).computation(config, ABCI)
    one_device = results(record(config, 1, 0.5, config=settings))
    assert one_device.computation(config, ABCI).step(8) == pytest.approx(0.5)


@pytest.mark.parametrize("other", [{"nodes": 8}, {"backend": "nccl (shared GPU)"}])
def test_ranks_that_share_a_device_or_have_a_node_each_are_no_base(config: Config, other: dict[str, Any]) -> None:
    """The oracle puts eight V100s of this cluster into two nodes."""
    launch = {"world_size": 8, "device_type": "cuda", "nodes": 2, "backend": "nccl"}
    there, elsewhere = (results(record(config, 8, 0.5, launch={**launch, **more})) for more in ({}, other))
    assert there.computation(config, ABCI).basis == "ddp on 8 devices (run-8)"
    with pytest.raises(UserError, match="has no complete run"):
        elsewhere.computation(config, ABCI)


def test_nothing_is_learned_of_a_framework_without_equations() -> None:
    """Its row has the refusal; an error here would end the predictions of all others."""
    config = configuration("+framework=parameter_server", *WORDS[1:])
    there = results(record(config, 1, 0.5), record(config, 2, 0.6))
    assert there.learned(config, ABCI) is None
    row = predict(config, 4, Inputs(ABCI, lambda asked: there.computation(asked, ABCI)))
    assert (row.status, "sends by gloo" in row.reason) == ("unsupported", True)


def test_a_record_without_a_key_that_was_added_later_has_the_same_settings(config: Config) -> None:
    """`topk_ratio` came later; without it a run on several devices was no base."""
    framework = {key: value for key, value in config.resolved["framework"].items() if key != "topk_ratio"}
    assert len(framework) < len(config.resolved["framework"])
    there = results(record(config, 8, 0.5, config={**config.resolved, "framework": framework}))
    assert there.computation(config, ABCI).basis == "ddp on 8 devices (run-8)"


def test_runs_that_are_faster_than_their_communication_are_refused(config: Config) -> None:
    with pytest.raises(UserError, match="communication alone is predicted to take"):
        results(record(config, 8, 1e-6)).computation(config, ABCI)


def test_runs_that_do_not_show_how_long_they_compute_are_refused() -> None:
    """Messages set the rate of PipeDream's stages, so that a step is as long whatever they compute."""
    config = configuration("+framework=pipedream", *WORDS[1:], "framework.pp=4", "train.micro_batch=2")
    slow = replace(ABCI, devices_per_node=1, links=(ABCI.links[0], replace(ABCI.links[1], bytes_per_s=1e6)))
    four = by_one_step(config, 4, slow, OneStep(0.01, 8, 2))
    assert four.step_s is not None
    ledger = {"global_batch": 32, "data_size": 1, "micro_batches": 16}
    there = results(record(config, 4, four.step_s, ledger=ledger))
    with pytest.raises(UserError, match="hardly depends on computing: measure one device"):
        there.computation(config, slow)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "oom"},
        {"launch": {"world_size": 1, "device_type": "cpu"}},
        {"environment": {"gpu_model": "NVIDIA H200"}},
        {"summary": {"throughput_samples_per_s": "fast"}},
        {"summary": None},
    ],
)
def test_what_is_no_base(config: Config, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no complete run of resnet50 on one Tesla V100-SXM2-16GB"):
        results(record(config, 1, 0.5, **changes)).computation(config, ABCI)


def test_a_run_whose_summary_the_tables_leave_out_is_no_base(tmp_path: Path) -> None:
    kept, changed = (write_run(tmp_path, repeat=number) for number in range(2))
    (changed / "epochs.jsonl").unlink()
    assert [run.folder for run in Results.read(tmp_path).runs if run.row["throughput_samples_per_s"]] == [kept]
    shutil.copytree(kept.parent, tmp_path / "backup")
    assert len(Results.read(tmp_path).runs) == 2, "a copy is no repeat"


@pytest.mark.parametrize(("key", "value"), [("precision", "fp16"), ("deterministic", True), ("cudnn_benchmark", True)])
def test_a_run_with_other_kernels_is_no_base(config: Config, key: str, value: object) -> None:
    """Deterministic algorithms are slower, and autotuned ones faster. A record without the key is from before it."""
    settings = {**config.resolved, "train": {**config.resolved["train"], key: value}}
    with pytest.raises(UserError, match=rf"nearest has train\.{key}={value}, not (fp32|False|None)"):
        results(record(config, 1, 0.5, config=settings)).computation(config, ABCI)
    older = {**config.resolved, "train": {name: value for name, value in settings["train"].items() if name != key}}
    assert results(record(config, 1, 0.5, config=older)).computation(config, ABCI).step(8) == pytest.approx(0.5)


def test_runs_on_another_machine_s_cpu_carry_a_mark(config: Config) -> None:
    """All CPUs are one kind of device: the host tells them apart."""
    marks: list[list[str]] = []
    for host in (platform.node(), "elsewhere"):
        launch = {"world_size": 1, "device_type": "cpu", "hosts": [host]}
        marks.append(results(record(config, 1, 0.5, launch=launch)).computation(config, load("local")).marks(8))
    assert marks == [[], [f"runs on the CPU of elsewhere, not of {platform.node()}"]]


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("loader", {"name": "dali"}),
        ("loader", {"workers": 7}),
        ("model", {"image_size": 224}),
        ("data", {"name": "imagenet"}),
    ],
)
def test_another_loader_s_rate_is_not_taken(config: Config, section: str, change: dict[str, Any]) -> None:
    settings = {**config.resolved, "mode": "loader", section: {**config.resolved[section], **change}}
    assert results(record(config, 2, 0.5, config=settings)).loader_rate(config) is None


def test_the_loader_s_rate_and_the_samples_of_an_epoch(config: Config) -> None:
    settings = {**config.resolved, "mode": "loader"}
    dataset = {"name": config.data.name, "train_samples": 3000}
    runs = [record(config, 2, seconds, config=settings, dataset=dataset) for seconds in (0.4, 0.5, 0.8)]
    result = results(*runs, record(config, 2, 0.1, config=settings, status="oom"))
    assert result.loader_rate(config) == 16  # 16 samples in 0.5 s by two ranks; of three runs the median
    assert result.samples(config) == 3000
    longer = {**settings, "model": {**settings["model"], "seq_len": 5}}
    assert results(record(config, 2, 0.5, config=longer, dataset=dataset)).samples(config) is None
