"""Two sets of results side by side, and the gate on them, by hand."""

from __future__ import annotations

import pytest

from ddlbench.report.__main__ import main, share
from tests.support.records import write_run

ENVIRONMENT = {"torch": "2.14.1", "cuda": "13.0", "driver": "1", "packages": {"deepspeed": "0.18.1"}}


def repeats(results, rates, environment=ENVIRONMENT, **others):
    for repeat, rate in enumerate(rates):
        write_run(results, rate=rate, repeat=repeat, sections={"environment": environment}, **others)


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


@pytest.mark.parametrize(
    ("after", "limit", "code", "said"),
    [
        ([80.0] * 6, "5%", 1, "slower by more than 5 %: ddp, resnet50, native, 1 GPU, batch 32: at least 1.250"),
        ([80.0] * 6, "0.3", 0, "no measurement is shown to be slower by more than 30 %"),
        ([96.0] * 6, "5%", 0, "no measurement is shown to be slower by more than 5 %"),
        ([80.0, 80.0, 80.0, 80.0, 80.0, 100.0], "5%", 0, "no measurement is shown"),  # 1 to 1.25: it may be equal
        (
            [80.0] * 5,
            "5%",
            3,
            "too few repeats to decide (6 a side are needed): ddp, resnet50, native, 1 GPU",
        ),
        ([120.0] * 6, "5%", 0, "ratio 0.833 (faster"),
    ],
)
def test_the_gate_fails_for_what_is_slower_than_the_limit(tmp_path, capsys, after, limit, code, said):
    repeats(tmp_path / "a", [100.0] * 6)
    repeats(tmp_path / "b", after)
    found = compare(tmp_path, capsys, "--fail-if-slower", limit)
    assert found[0] == code
    assert said in found[1]


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


def test_nothing_changed(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0, 101.0])
    repeats(tmp_path / "b", [100.0, 101.0])
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "5%")
    assert code == 3
    assert said.startswith("nothing changed in configuration and environment\n")


def test_two_environments_of_one_set_are_paired_with_their_own(tmp_path, capsys):
    for side in "ab":
        repeats(tmp_path / side, [100.0] * 6)
        repeats(tmp_path / side, [50.0] * 6, ENVIRONMENT | {"driver": "2"}, train={"timeout_s": 9.0})
    code, said = compare(tmp_path, capsys, "--fail-if-slower", "1%")
    assert code == 0
    assert said.count("ratio 1.000") == 2


def test_nothing_in_common_is_one_line(tmp_path, capsys):
    repeats(tmp_path / "a", [100.0])
    repeats(tmp_path / "b", [100.0], framework="fsdp")
    code, said = compare(tmp_path, capsys)
    assert code == 2
    assert said.startswith("ddlbench.report: the sets have no measurement in common (1 and 1): ")


def test_a_gate_without_two_sets_is_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--fail-if-slower", "5%"]) == 2
    assert "--compare BEFORE AFTER" in capsys.readouterr().err
    assert main([]) == 2


def test_shares():
    assert (share("5%"), share("0.05"), share("0%")) == (0.05, 0.05, 0.0)
    with pytest.raises(ValueError, match="-1"):
        share("-1%")
