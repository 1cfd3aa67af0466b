"""The timeline of a prediction ends when its step ends, and no rank does two things at once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.oracle.predictor import Prediction
from ddlbench.predict.__main__ import main
from ddlbench.predict.traces import timeline
from ddlbench.rehearsal.rehearse import Slice, write_trace
from tests.oracle.made import by_roofline
from tests.support.rehearsals import MODELS, WORLD, config

TWO_STAGES_A_RANK = {"interleaved", "looped_bfs", "zbv", "dualpipev"}
KINDS = {"zero_bubble": "FIW", "zbv": "FIW", "dualpipev": "FBIW"}
SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "hybrid", *sorted(TWO_STAGES_A_RANK)]


@cache
def predicted(framework: str, loader: float | None = None) -> tuple[Prediction, list[Slice]]:
    row = by_roofline(config(framework, "gpt2_small", "train.batch_per_gpu=8"), WORLD, loader=loader)
    assert row.status == "ok", row.reason
    return row, list(timeline(row))


@pytest.mark.parametrize("loader", [None, 100.0])
@pytest.mark.parametrize("framework", [*SCHEDULES, "pipedream", "ddp", "fsdp", "zero1"])
def test_the_times_add_up_to_the_step(framework: str, loader: float | None) -> None:
    row, slices = predicted(framework, loader)
    assert max(item.start + item.seconds for item in slices) == pytest.approx(row.step_s)
    assert min(item.start for item in slices) == 0
    tracks: dict[str, list[tuple[float, float]]] = {}
    for item in slices:
        assert item.seconds >= 0
        if not item.overlaps:
            tracks.setdefault(item.track, []).append((item.start, item.start + item.seconds))
    for spans in tracks.values():
        assert all(end <= begin + 1e-12 for (_, end), (begin, _) in pairwise(sorted(spans)))


def test_what_no_term_explains_is_at_the_end() -> None:
    row, _ = predicted("ddp")
    assert row.step_s is not None
    *_, last = timeline(replace(row, step_s=row.step_s + 1.0, unexplained_s=1.0))
    assert (last.name, last.start, last.seconds) == ("not explained by the model", pytest.approx(row.step_s), 1.0)


@pytest.mark.parametrize("framework", SCHEDULES)
def test_every_rank_of_a_pipeline_computes_every_micro_batch(framework: str) -> None:
    row, slices = predicted(framework)
    passes = [item for item in slices if not item.overlaps and "micro batch" in item.args]
    computed = [(item.args["stage"], item.args["micro batch"], item.name[0]) for item in passes]
    stages, kinds = {stage for stage, _, _ in computed}, {kind for _, _, kind in computed}
    assert kinds == set(KINDS.get(framework, "FB"))
    assert len(stages) == row.layout["pp"] * (2 if framework in TWO_STAGES_A_RANK else 1)
    micro_batches = {micro for _, micro, _ in computed}
    whole = {(stage, micro, kind) for stage, micro, kind in computed if kind != "W"}
    halves = sum(kind == "I" for *_, kind in computed)
    assert len(whole) == 2 * len(stages) * len(micro_batches)
    assert len(computed) == len(set(computed)) == len(whole) + halves


def test_events_have_names_and_microseconds(tmp_path: Path) -> None:
    slices = [Slice("ddp", "rank 0", "computing", 0.0, 2.0, {"x": 1}), Slice("ddp", "link", "m", 1.0, 0.5, {}, True)]
    write_trace(tmp_path / "step.json", slices)
    made = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in made if event["ph"] == "M"] == ["ddp", "rank 0", "link"]
    whole, begin, end = (event for event in made if event["ph"] != "M")
    assert (whole["ts"], whole["dur"], whole["args"], whole["tid"]) == (0, 2e6, {"x": 1}, 1)
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"], end["tid"]) == ("b", 1e6, "e", 1.5e6, 2)
    assert begin["id"] == end["id"]
    with pytest.raises(UserError, match=r"no/step\.json cannot be written \(No such file or directory\)"):
        write_trace(tmp_path / "no" / "step.json", slices)


def test_the_command_writes_the_timeline_of_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+model=resnet50", *MODELS["resnet50"], "cluster=h100", "train.batch_per_gpu=8", "gpus=[4]"]
    for framework in ("gpipe", "ddp", "spatial"):
        file = tmp_path / f"{framework}.json"
        assert main([*words, f"+framework={framework}", "--json", f"--timeline={file}"]) == 0
        step = json.loads(capsys.readouterr().out)[0]["step_s"]
        made = json.loads(file.read_text())["traceEvents"]
        assert made[0]["args"]["name"] == f"{framework} at 4 GPUs"
        assert max(event["ts"] + event.get("dur", 0.0) for event in made if event["ph"] != "M") == pytest.approx(
            step * 1e6
        )
