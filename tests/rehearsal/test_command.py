"""mode=rehearsal of the main command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import rehearsal
from tests.support.processes import PYTHON, run
from tests.support.rehearsals import config, words

ALONE, TWO = Launch("alone"), Launch("torchrun", 0, 2, 0, 2)


def test_the_main_command_prints_json_and_records_nothing(tmp_path: Path) -> None:
    rank = ("rehearsal.gpus=8", "rehearsal.rank=7", "rehearsal.device=cuda", "rehearsal.json=true")
    main = (PYTHON, "-m", "ddlbench", *words("gpipe", "gpt2_small"), "mode=rehearsal")
    done = run(*main, *rank, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rank"], found["device"], found["coordinates"]) == (7, "cuda", {"dp": 1, "pp": 3})
    assert found["memory"]["parameters"]
    assert not list(tmp_path.iterdir())


def test_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearsal(config("gpipe", "gpt2_small", "mode=rehearsal", "rehearsal.gpus=8"), ALONE) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpipe, gpt2_small: rank 0 of 8 on cpu (dp 0, pp 0)\n")
    assert "collective of a step: send among 4 ranks, 2 apart: " in out


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
