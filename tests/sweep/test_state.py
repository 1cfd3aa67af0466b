"""What is done is read from records alone."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.keys import added_later, measured_part
from ddlbench.heartbeat import Process
from ddlbench.record.files import HEARTBEAT
from ddlbench.sweep import local
from ddlbench.sweep.local import run_cells
from ddlbench.sweep.lock import Queue
from ddlbench.sweep.plan import Cell, plan
from ddlbench.sweep.state import Overview, State, due
from ddlbench.sweep.study import load
from tests.support.killed import beat, ended_process
from tests.sweep.studies import CPU, KEYS, planned, record, write, write_record


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    return sorted(planned(write(tmp_path, repeats=2)), key=lambda cell: (cell.place, cell.repeat))


def test_a_record_of_what_a_cell_measures_is_its_record(tmp_path: Path, cells: list[Cell]) -> None:
    record(tmp_path / "results", cells[1])
    state = State(tmp_path / "results").refresh()
    assert [state.status(cell) for cell in cells] == ["missing", "ok", *["missing"] * 4]


def test_renamed_code_and_moved_results_are_still_the_same_cells(tmp_path: Path, cells: list[Cell]) -> None:
    """Older records name classes, and lack keys that were added later."""
    made = configuration(*cells[0].words)
    old = measured_part(made.resolved, added_later(made))
    old["framework"]["_target_"] = "ddlbench.frameworks.single.Before"
    write_record(tmp_path / "before", old, cells[0].gpus, "any-name/attempt-1")
    shutil.move(tmp_path / "before", tmp_path / "results")
    assert State(tmp_path / "results").refresh().status(cells[0]) == "ok"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["error"], "error"),
        (["ok", "error"], "ok"),
        (["error", "ok"], "ok"),
        (["oom", "error"], "error"),
        (["killed"], "missing"),
        (["ok", "killed"], "ok"),
        (["running"], "running"),
        (["unsupported"], "unsupported"),
        (["unsupported", "ok"], "ok"),
        (["unsupported", "error"], "error"),
    ],
)
def test_the_status_of_several_attempts(tmp_path: Path, cells: list[Cell], statuses: list[str], expected: str) -> None:
    for number, status in enumerate(statuses, 1):
        record(tmp_path / "results", cells[0], status, number)
    assert State(tmp_path / "results").refresh().status(cells[0]) == expected


def test_a_run_that_was_killed_with_all_its_ranks_gets_its_end_from_the_next_sweep(
    tmp_path: Path, cells: list[Cell]
) -> None:
    """At its last heartbeat: until then its GPUs were used. Its cell is still to be run."""
    folder = record(tmp_path / "results", cells[0], "running")
    content = json.loads((folder / "run.json").read_text())
    last = beat(folder, ended_process(), 60)
    content["times"] |= {"end": None, "start": datetime.fromtimestamp(last - 36, UTC).isoformat()}
    (folder / "run.json").write_text(json.dumps(content))
    state = State(tmp_path / "results").refresh()
    assert state.status(cells[0]) == "missing"
    assert state.of(cells[0])[0].seconds == pytest.approx(36, rel=1e-3)
    after = json.loads((folder / "run.json").read_text())
    assert (after["status"], after["reason"][:37]) == ("killed", "no end was recorded and its process h")
    assert not (folder / HEARTBEAT).exists()
    assert State(tmp_path / "results").refresh().status(cells[0]) == "missing"


def test_a_run_that_goes_on_keeps_its_record(tmp_path: Path, cells: list[Cell]) -> None:
    folder = record(tmp_path / "results", cells[0], "running")
    before = (folder / "run.json").read_bytes()
    beat(folder, Process.this(), 60)
    assert State(tmp_path / "results").refresh().status(cells[0]) == "running"
    assert (folder / "run.json").read_bytes() == before


def test_a_cell_that_another_program_runs_here_is_running_and_not_started_beside_it(
    tmp_path: Path, cells: list[Cell], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sweep holds it: its words were given to `python -m ddlbench`."""
    beat(record(tmp_path / "results", cells[0], "running"), Process.this(), 60)
    state, said = State(tmp_path / "results").refresh(), list[str]()
    assert Overview(cells[:1], state, Queue({})).statuses == {cells[0].key: "running"}
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    run_cells(cells[:1], state, None, said.append)
    name = f"{cells[0].name} repeat {cells[0].repeat}"
    assert said == [f"{name}: left out, because another program runs it on this machine"]
    assert len(state.refresh().of(cells[0])) == 1


def test_a_cell_that_another_program_ends_meanwhile_is_not_run_again(
    tmp_path: Path, cells: list[Cell], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = record(tmp_path / "results", cells[0], "running"), list[str]()
    beat(folder, Process.this(), 60)
    state = State(tmp_path / "results").refresh()
    ended = (folder / "run.json").read_text().replace('"running"', '"ok"')
    monkeypatch.setattr("time.sleep", lambda _: (folder / "run.json").write_text(ended))  # it ends while this one waits
    monkeypatch.setattr(local, "run_cell", lambda *_: pytest.fail("a second attempt was started"))
    run_cells(cells[:1], state, None, said.append)
    assert (said, state.status(cells[0])) == ([], "ok")


def test_a_run_that_its_time_limit_ended_is_not_started_again(tmp_path: Path, cells: list[Cell]) -> None:
    """The field counts; what a reason quotes does not, nor does a record without the field, as older versions wrote."""
    record(tmp_path / "a", cells[0], "killed", ended_by="time_limit", reason="rank 0 received SIGUSR1")
    record(tmp_path / "b", cells[0], "killed", ended_by="signal", reason="rank 0 received SIGINT")
    record(tmp_path / "c", cells[0], "killed", reason="rank 0 of /data/SIGUSR1 received SIGTERM")
    record(tmp_path / "d", cells[0], "error", reason="no folder train.time_limit_s", checkpoints={"count": 2})
    ends = [State(tmp_path / name).refresh().status(cells[0]) for name in ("a", "b", "c", "d")]
    assert [due(end, None) for end in ends] == [False, True, True, False]


@pytest.mark.parametrize("status", ["killed", "timeout"])
def test_a_run_that_its_time_limit_ended_continues_where_it_has_saved(
    tmp_path: Path, cells: list[Cell], status: str
) -> None:
    record(tmp_path / "a", cells[0], status, ended_by="time_limit", checkpoints={"count": 2})
    record(tmp_path / "b", cells[0], status, ended_by="time_limit")  # it would reach its limit again
    saved, lost = (State(tmp_path / name).refresh().status(cells[0]) for name in ("a", "b"))
    assert (saved, lost) == ("missing", status)
    record(tmp_path / "a", cells[0], "error", 2, reason="rank 0: KeyError", checkpoints={"count": 2})
    assert State(tmp_path / "a").refresh().status(cells[0]) == "error"


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (None, {"missing", "running"}),
        ("failed", {"missing", "running", "error", "timeout", "killed"}),
        ("oom", {"missing", "running", "oom"}),
        ("all", {"missing", "running", "error", "timeout", "killed", "oom", "unsupported"}),
    ],
)
def test_what_is_started(retry: str | None, expected: set[str]) -> None:
    known = ("ok", "error", "timeout", "killed", "oom", "unsupported", "missing", "running")
    assert {status for status in known if due(status, retry)} == expected


def test_hours_and_estimates_come_from_finished_runs(tmp_path: Path, cells: list[Cell]) -> None:
    """ddp on 2 GPUs: one run of 90 s, one missing; a failed one of 36 s counts as used, not as an estimate."""
    two = [cell for cell in cells if cell.name == "ddp gpus=2"]
    record(tmp_path / "results", two[0], "error", 1, 36)
    record(tmp_path / "results", two[0], "ok", 2, 90)
    state = State(tmp_path / "results").refresh()
    text = "\n".join(Overview(cells, state, Queue({})).plan_lines())
    assert "ddp        2     2     missing 1, ok 1  90.0   0.050" in text
    assert "GPU-hours used: 0.070" in text
    assert "remaining, one after another: 1.5 minutes, 0.050 GPU-hours; 4 more cells have no finished run" in text


def test_a_run_that_continued_another_one_is_no_estimate(tmp_path: Path, cells: list[Cell]) -> None:
    """It took the time of its own epochs alone."""
    record(tmp_path / "results", cells[0], "killed", 1, 600)
    record(tmp_path / "results", cells[0], "ok", 2, 60, resume={"attempt": 1, "epoch": 9})
    before = Overview(cells[:2], State(tmp_path / "results").refresh(), Queue({}))
    assert (before.statuses[cells[0].key], before.groups[0].seconds) == ("ok", None)
    record(tmp_path / "results", cells[1], "ok", 3, 660)
    after = Overview(cells[:2], State(tmp_path / "results").refresh(), Queue({}))
    assert (after.groups[0].seconds, after.groups[0].least) == (660, "")


def test_a_key_that_a_framework_lacks_has_a_column_all_the_same(tmp_path: Path) -> None:
    """Each framework has one key that the other lacks."""
    axes = {"framework": ["ddp", "tensor"], "framework.bucket_cap_mb": [25], "framework.tp": [2], "gpus": [2]}
    cells = planned(write(tmp_path, axes=axes, exclude=[]))
    state = State(tmp_path / "results").refresh()
    head, _, *rows = Overview(cells, state, Queue({})).plan_lines()
    assert {"framework", "framework.bucket_cap_mb", "framework.tp", "gpus"} < {*head.split()}
    assert {name: {*values[:2]} for name, *values in map(str.split, rows[:2])} == {"ddp": {"25", "2"}, "tensor": {"2"}}


def test_a_status_names_each_failure_with_its_reason(tmp_path: Path, cells: list[Cell]) -> None:
    record(tmp_path / "results", cells[2], "oom", reason="CUDA out of\x1b[31m memory")
    state = State(tmp_path / "results").refresh()
    lines = Overview(cells, state, Queue({})).status_lines()
    assert lines[0] == "6 cells: missing 5, oom 1"
    assert any("ddp gpus=1 repeat 0: oom: CUDA out of" in line and "\x1b" not in line for line in lines)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": "ok"}', '{"config": 3}', "[" * 9999, '{"times": {}}'])
def test_a_file_that_is_no_record_is_counted_and_harms_nothing(tmp_path: Path, cells: list[Cell], content: str) -> None:
    record(tmp_path / "results", cells[0])
    (tmp_path / "results/x/attempt-1").mkdir(parents=True)
    (tmp_path / "results/x/attempt-1/run.json").write_text(content)
    state = State(tmp_path / "results").refresh()
    assert state.status(cells[0]) == "ok"
    assert "1 records cannot be read" in "\n".join(Overview(cells, state, Queue({})).status_lines())


def test_planning_and_the_status_cost_the_same_for_each_of_many_cells(tmp_path: Path) -> None:
    def cpu_seconds(settings: int) -> float:
        """Of a study of 50 cells for each setting, which all have a record."""
        axes = {"framework": ["ddp"], "gpus": [1, 2, 4, 8, 16], "train.clip_norm": list(range(1, settings + 1))}
        study = load(str(write(tmp_path, axes=axes, exclude=[], repeats=10, keys=KEYS | {"batch": 64})))
        made, results = configuration(*study.words(next(study.points()))), tmp_path / f"{settings}"
        resolved, later = made.resolved, added_later(made)
        for repeat, point in itertools.product(range(10), study.points()):
            train = resolved["train"] | {"clip_norm": float(point["train.clip_norm"]), "repeat": repeat}
            name = f"{point['gpus']}-{point['train.clip_norm']}-{repeat}/attempt-1"
            write_record(results, resolved | {"train": train}, point["gpus"], name, config_added_later=later)
        began = time.process_time()  # the load of the machine does not count
        cells, state = plan(study, CPU), State(results).refresh()
        lines = Overview(cells, state, Queue({})).status_lines()
        assert lines[0] == f"{50 * settings} cells: ok"
        return time.process_time() - began

    few, many = cpu_seconds(4), cpu_seconds(40)
    assert many < 20 * few  # 10 times as many cells; compared pair by pair they would take 100 times as long
