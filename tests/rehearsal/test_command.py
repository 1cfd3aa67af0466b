"""mode=rehearsal of the main command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ddlbench.__main__ as program
from ddlbench.errors import UserError
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import rehearsal
from tests.support.rehearsals import config, words

ALONE, TWO = Launch("alone"), Launch("torchrun", 0, 2, 0, 2)


def test_the_main_command_prints_json_and_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = ("rehearsal.gpus=8", "rehearsal.rank=7", "rehearsal.device=cuda", "rehearsal.json=true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddlbench", *words("gpipe", "gpt2_small"), "mode=rehearsal", *rank])
    assert program.main() == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["rank"], result["device"], result["coordinates"]) == (7, "cuda", {"dp": 1, "pp": 3})
    assert result["memory"]["parameters"]
    assert not list(tmp_path.iterdir())


def test_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearsal(config("gpipe", "gpt2_small", "mode=rehearsal", "rehearsal.gpus=8"), ALONE) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpipe, gpt2_small: rank 0 of 8 on cpu (dp 0, pp 0)\n")
    assert "collective of a step: send among 4 ranks, 2 apart: " in out


def test_the_trace_has_every_operation_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, a microsecond each: no seconds are measured."""
    file = tmp_path / "trace.json"
    made = config("gpipe", "gpt2_small", "mode=rehearsal", "rehearsal.gpus=8", "rehearsal.json=true")
    made.rehearsal.trace = str(file)
    assert rehearsal(made, ALONE) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "operations" not in printed
    names, events = [], []
    for event in json.loads(file.read_text())["traceEvents"]:
        (names if event["ph"] == "M" else events).append(event)
    assert [event["args"]["name"] for event in names] == [
        "gpipe: rank 0 of 8, one operation per microsecond (not measured)", "computing", "communication"
    ]  # fmt: skip
    assert [(event["ts"], event["dur"]) for event in events] == [(pytest.approx(i), 1.0) for i in range(len(events))]
    assert sum(event["args"].get("flops", 0) for event in events) == printed["flops"]
    for sent in printed["collectives"]:
        group = {key: sent[key] for key in ("kind", "ranks", "stride")}
        result = [event["args"]["bytes"] for event in events if group.items() <= event["args"].items()]
        assert (len(result), sum(result)) == (sent["count"], sent["bytes_"])
    assert {event["args"].get("peer") for event in events} == {None, 2}
    made.rehearsal.trace = str(tmp_path / "no" / "trace.json")
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\): choose another file"):
        rehearsal(made, ALONE)


@pytest.mark.parametrize(
    ("more", "launch", "message"),
    [
        (("rehearsal.gpus=8", "rehearsal.rank=8"), ALONE, "rehearsal.rank=8 must be a number from 0 to 7"),
        (("rehearsal.device=tpu",), ALONE, "rehearsal.device=tpu must be one of cpu, cuda"),
        (("rehearsal.gpus=0",), ALONE, "rehearsal.gpus=0 must be 1 or more"),
        (("rehearsal.nodes=1",), ALONE, "rehearsal.nodes does not exist"),
        (("mode=train", "rehearsal.gpus=8"), ALONE, "the keys of rehearsal describe a job for mode=rehearsal"),
        (("rehearsal.gpus=8",), TWO, "mode=rehearsal runs in one process and torchrun started 2"),
    ],
)
def test_bad_input_is_one_line(more: tuple[str, ...], launch: Launch, message: str) -> None:
    mode = () if "mode=train" in more else ("mode=rehearsal",)
    with pytest.raises(UserError, match=message) as told:
        rehearsal(config("gpipe", "gpt2_small", *mode, *more), launch)
    assert "\n" not in str(told.value)
