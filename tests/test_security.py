"""What comes from others is data: results, studies, data sets. pyproject.toml bans the calls that would run code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddlbench.record.record import Record
from ddlbench.report.__main__ import main as report
from ddlbench.sweep.lock import claim
from ddlbench.sweep.state import State
from tests.support.epoch_rows import epoch_row
from tests.support.records import write_run


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that anybody could import, and that leaves a file when somebody does."""
    folder = tmp_path / "modules"
    folder.mkdir()
    trace = tmp_path / "imported"
    (folder / "planted_module.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(folder)
    yield trace
    sys.modules.pop("planted_module", None)


def test_a_class_that_a_record_names_is_never_imported(tmp_path: Path, planted: Path) -> None:
    """By the report, and by a sweep that reads the record as its state."""
    results = tmp_path / "results"
    path = write_run(results) / "run.json"
    content: dict[str, Any] = json.loads(path.read_text())
    for section in ("framework", "model", "loader", "data", "recipe"):
        content["config"][section] = {**content["config"].get(section, {}), "_target_": "planted_module.Thing"}
    content["config"]["_target_"] = content["_target_"] = "planted_module.Thing"
    path.write_text(json.dumps(content))
    assert report([str(results), "--out", str(tmp_path / "out")]) == 0
    state = State(results).refresh()
    assert not planted.exists()
    assert len(state.attempts) == 1
    import planted_module  # noqa: F401  # pyright: ignore

    assert planted.exists()  # an import would have been seen


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_files_of_a_record_and_of_a_sweep_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        record = Record.open(str(tmp_path), "run", {})
        record.epoch(epoch_row(0, 1, [1.0, 2.0]))
        held = claim(tmp_path, "cell")
        assert held is not None
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert record.finish("ok")
        held.release()
        files += [path for path in tmp_path.rglob("*") if path.is_file()]
    finally:
        os.umask(before)
    assert len(files) > 8
    modes = {path.name: path.stat().st_mode & 0o777 for path in files if path.exists()}
    assert {name for name, mode in modes.items() if mode != 0o666 & ~umask} == set(), modes
