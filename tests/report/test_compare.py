"""Two sets of results side by side, and the gate on them, by hand."""

from __future__ import annotations

import pytest

from ddlbench.report.__main__ import main, share
from tests.support.records import edited, write_repeats, write_run

ENVIRONMENT = {"torch": "2.14.1", "cuda": "13.0", "driver": "1", "packages": {"deepspeed": "0.18.1"}}


def repeats(results, rates, environment=ENVIRONMENT, **others):
    write_repeats(results, *rates, sections={"environment": environment}, **others)


def compare(tmp_path, capsys, *options):
    code = main(["--compare", str(tmp_path / "a"), str(tmp_path / "b"), *options])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_what_changed_comes_before_the_numbers(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0] * 6, gpus=2)
    newer = ENVIRONMENT | {"driver": "2", "packages": {"deepspeed": "0.19.8"}, "variables": {"NCCL_ALGO": "Ring"}}
    repeats(tmp_path / "b", [80.0] * 6, newer, gpus=2, train={"compile": True})
    code, said = compare(tmp_path, capsys)
    assert code == 0, "no gate was asked for"
    assert said.splitlines() == [
        "changed:",
        "  configuration: train.compile: not set -> true",
        "  environment: driver: 1 -> 2",
        "  environment: packages.deepspeed: 0.18.1 -> 0.19.8",
        "  environment: variables.NCCL_ALGO: not set -> Ring",
        "",
        "times (seconds a sample, medians; ratio after / before):",
        "  ddp, resnet50, native, 2 GPUs, batch 64: 10.0 ms -> 12.5 ms, ratio 1.250 "
        "(slower, 1.250 to 1.250, n=6 and n=6)",
    ]


def test_measurements_that_differ_in_their_settings_have_them_in_their_names(tmp_path, capsys):
    for name, size in (("a", 25), ("a", 50), ("b", 25), ("b", 50), ("b", 100)):
        repeats(tmp_path / name, [100.0 + size], knobs={"bucket_cap_mb": size})
    _, said = compare(tmp_path, capsys)
    for size in (25, 50):
        assert f"  ddp, resnet50, native, 1 GPU, batch 32, bucket_cap_mb={size}: " in said
    assert "only in after: ddp, resnet50, native, 1 GPU, batch 32, bucket_cap_mb=100" in said


@pytest.mark.parametrize(
    ("after", "limit", "code", "said"),
    [
        ([80.0] * 6, "5%", 1, "slower by more than 5 %: ddp, resnet50, native, 1 GPU, batch 32: at least 1.250"),
        ([80.0] * 6, "0.3", 0, "no measurement is shown to be slower by more than 30 %"),
        ([96.0] * 6, "5%", 0, "no measurement is shown to be slower by more than 5 %"),
        ([80.0, 80.0, 80.0, 80.0, 80.0, 100.0], "5%", 0, "no measurement is shown"),  # 1 to 1.25: it may be equal
        ([80.0] * 5, "5%", 3, "too few repeats to decide (6 a side are needed): ddp, resnet50, native, 1 GPU"),
        ([120.0] * 6, "5%", 0, "ratio 0.833 (faster"),
    ],
)
def test_the_gate_fails_for_what_is_slower_than_the_limit(tmp_path, capsys, after, limit, code, said):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "b", after)
    result = compare(tmp_path, capsys, "--fail-if-slower", limit)
    assert result[0] == code
    assert said in result[1]


def test_what_no_longer_ends_ok_fails_the_gate_and_single_ones_are_named(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "a", [100.0], framework="fsdp")
    write_run(tmp_path / "b", status="oom", sections={"environment": ENVIRONMENT})
    repeats(tmp_path / "b", [100.0], framework="zero1")
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 1
    assert "10.0 ms before, no time after (oom)" in said
    assert "only in before: fsdp, resnet50" in said
    assert "only in after: zero1, resnet50" in said


def test_what_ends_ok_without_a_time_is_undecided(tmp_path, capsys):
    """The summaries after contradict their epochs."""
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "b", [100.0] * 6, summary={"epochs_done": 9})
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 3
    assert "10.0 ms before, no time after (ok)" in said
    assert "\nddp, resnet50, native, 1 GPU, batch 32: ended ok without a time\n" in said


def test_two_environments_of_one_set_are_paired_with_their_own(tmp_path, capsys):
    for side in "ab":
        repeats(tmp_path / side, [100.0] * 6)
        repeats(tmp_path / side, [50.0] * 6, ENVIRONMENT | {"driver": "2"}, train={"timeout_s": 9.0})
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "1%")
    assert code == 0
    assert said.startswith("nothing changed in configuration and environment\n")
    assert said.count("ratio 1.000") == 2


def test_nothing_in_common_is_one_line(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0])
    repeats(tmp_path / "b", [100.0], framework="fsdp")
    code, said = compare(tmp_path, capsys)
    assert code == 2
    assert said.startswith("ddlbench.report: the sets have no measurement in common (1 and 1): ")


@pytest.mark.parametrize(
    "other",
    [
        {"gpus": 4, "per_gpu": 16},
        {"per_gpu": 64},
        {"train": {"precision": "bf16"}},
        {"loader": "dali"},
        {"model": "resnet101"},
        {"changed": {"layers": [1, 1, 1, 1]}},
        {"framework": "fsdp"},
        {"device": "cpu"},
    ],
    ids=str,
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_is_no_counterpart_is_never_compared(tmp_path, capsys, other, nodes):
    """Also beside a measurement that is in both sets: twice as fast on other GPUs must not pass the gate."""
    repeats(tmp_path / "a", [100.0], gpus=2)
    repeats(tmp_path / "b", [200.0], **{"gpus": 2} | other)
    for path in (tmp_path / "b").glob("*/attempt-1/run.json"):
        with edited(path.parent) as record:
            record["launch"]["nodes"] = nodes
            record["ledger"]["precision"] = record["config"]["train"]["precision"]
    for side in "ab":
        repeats(tmp_path / side, [100.0] * 6, framework="single")
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 3
    assert said.count(", ratio ") == 1, "that of single"
    assert "nothing to compare with after: ddp, resnet50, native, 2 GPUs, batch 64" in said


def test_a_gate_without_two_sets_is_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--fail-if-slower", "5%"]) == 2
    assert "--compare BEFORE AFTER" in capsys.readouterr().err
    assert main([]) == 2


def test_a_share_is_a_percentage_or_a_fraction_below_1():
    assert (share("5%"), share("0.05"), share("0%"), share("150%")) == (0.05, 0.05, 0.0, 1.5)
    for text in ("-1%", "5", "nan"):  # 5 is 500 %: a gate that never fails
        with pytest.raises(ValueError, match=text):
            share(text)


def test_what_cannot_be_read_is_named_and_counted_for_each_set(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "b", [100.0] * 6)
    for folder in sorted((tmp_path / "b").iterdir())[:2]:
        (folder / "attempt-1" / "run.json").write_text('{"schema')
    assert main(["--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-if-slower", "5%"]) == 3
    said = capsys.readouterr()
    assert said.err.count("warning: ") == said.err.count("run.json cannot be read") == 2
    assert said.err.endswith("after: left out: 2 unreadable\n")
    assert "n=6 and n=4" in said.out


def test_a_measurement_that_is_missing_after_is_undecided(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "a", [100.0] * 6, framework="fsdp")
    write_run(tmp_path / "a", framework="zero3", status="oom", sections={"environment": ENVIRONMENT})
    repeats(tmp_path / "b", [100.0] * 6)
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 3
    assert said.splitlines()[-1] == "nothing to compare with after: fsdp, resnet50, native, 1 GPU, batch 32"
    assert compare(tmp_path, capsys)[0] == 0, "no gate"


def test_several_of_one_name_are_not_said_to_be_in_one_set_only(tmp_path, capsys):
    for side, bucket in (("a", 1), ("b", 2), ("b", 3)):
        repeats(tmp_path / side, [100.0], knobs={"bucket": bucket})
        repeats(tmp_path / side, [100.0], framework="fsdp", gpus=bucket)
    repeats(tmp_path / "a", [100.0], framework="single")
    repeats(tmp_path / "b", [100.0], framework="single")
    _, said = compare(tmp_path, capsys)
    ddp = "ddp, resnet50, native, 1 GPU, batch 32"
    assert said.splitlines()[-6:] == [
        f"not paired in before, because others differ in settings alone: {ddp}",
        "only in before: fsdp, resnet50, native, 1 GPU, batch 32",
        f"not paired in after, because others differ in settings alone: {ddp}, bucket=3",
        f"not paired in after, because others differ in settings alone: {ddp}, bucket=2",
        "only in after: fsdp, resnet50, native, 2 GPUs, batch 64",
        "only in after: fsdp, resnet50, native, 3 GPUs, batch 96",
    ]


def test_two_clusters_may_have_other_nodes(tmp_path, capsys):
    launch = {"world_size": 8, "ranks_per_node": 4, "device_type": "cuda", "backend": "nccl"}
    for side, nodes in (("a", 1), ("b", 2)):
        write_run(tmp_path / side, gpus=8, sections={"launch": launch | {"nodes": nodes}})
    code, said = compare(tmp_path, capsys)
    assert code == 0
    assert said.splitlines()[:2] == ["changed:", "  seen: nodes: 1 -> 2"]
    assert "ratio 1.000" in said


def test_what_may_be_slower_and_what_failed_is_said_and_only_runs_with_a_time_are_counted(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "b", [80.0] * 5 + [100.0])
    sections = {"environment": ENVIRONMENT}
    write_run(tmp_path / "b", repeat=7, summary={"throughput_samples_per_s": None}, sections=sections)
    for attempt in (2, 3):
        write_run(tmp_path / "b", attempt=attempt, status="oom", sections=sections)
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 0
    assert "(no difference shown, 1.000 to 1.250, n=6 and n=6, 0 and 2 attempts failed)" in said
    assert said.splitlines()[-3:] == [
        "no measurement is shown to be slower by more than 5 %",
        "not shown, and more repeats may show it: ddp, resnet50, native, 1 GPU, batch 32: up to 1.250 times the time",
        "after: left out: 1 ended ok without a rate",
    ]


@pytest.mark.parametrize("option", ["--only framework=ddp", "--by loader", "--out x", "--target val_top1=0.7", "x"])
def test_options_of_a_report_are_refused_beside_it(tmp_path, capsys, option):
    assert main([*option.split(), "--compare", str(tmp_path), str(tmp_path)]) == 2
    name = option.split()[0].replace("x", "RESULTS")
    assert capsys.readouterr().err == f"ddlbench.report: --compare makes no report: leave {name} out\n"
