from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddlbench.measure.devices.usage import HZ, Load, process_tree_seconds


def proc(folder: Path, stat: str, load: str = "3.00 2.00 1.00 1/100 42\n", some: float = 25.0) -> Path:
    (folder / "pressure").mkdir(parents=True)
    (folder / "loadavg").write_text(load)
    (folder / "stat").write_text(f"cpu  {stat}\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    lines = (
        f"some avg10={some:.2f} avg60=90.00 avg300=80.00 total=12\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    (folder / "pressure" / "cpu").write_text(lines)
    return folder


def test_a_node_with_known_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    # user nice system idle iowait irq softirq steal guest guest_nice
    before = Load.now(proc(tmp_path / "a", "100 10 20 800 5 1 4 60 50 5"))
    assert before == Load(
        load=0.75, pressure=0.25, stolen=60, ticks=1000, busy=135
    )  # guests' ticks are in user and nice
    after = Load.now(proc(tmp_path / "b", "150 10 20 840 5 1 4 70 90 5"))
    assert after.steal_share(before) == 10 / 100


def test_a_value_that_the_kernel_does_not_report_is_none(tmp_path: Path) -> None:
    nothing = Load.now(tmp_path)
    assert nothing == Load(None, None, None, None)
    assert nothing.steal_share(nothing) is None
    assert Load(0.0, 0.0, 5, 10).steal_share(Load(0.0, 0.0, 5, 10)) is None  # no time has passed


def test_what_others_computed_is_all_that_was_computed_less_the_runs_own() -> None:
    seconds = 2.0
    before = Load(None, None, 0, ticks=10_000, busy=4_000, own_s=30.0)
    after = Load(None, None, 0, ticks=11_000, busy=4_500, own_s=30.0 + seconds)
    assert after.others_share(before) == pytest.approx((500 - seconds * HZ) / 1000)
    assert replace(after, own_s=99.0).others_share(before) == 0.0  # ticks are coarse
    for unknown in ({"own_s": None}, {"busy": None}, {"ticks": None}):
        assert replace(after, **unknown).others_share(before) is None
        assert after.others_share(replace(before, **unknown)) is None
    assert before.others_share(before) is None  # no time has passed


def process(proc: Path, name: str, ticks: str, children: str | None) -> None:
    """ticks: utime stime cutime cstime"""
    task = proc / name / "task" / name
    task.mkdir(parents=True)
    (proc / name / "stat").write_text(f"{name} (a name) with ) R 1 1 1 0 -1 4194304 0 0 0 0 {ticks} 20 0 1 0 5 6 7")
    if children is not None:
        (task / "children").write_text(children)


def test_seconds_of_a_process_with_its_children(tmp_path: Path) -> None:
    process(tmp_path, "self", "100 20 30 4", "7 8 9 ")
    process(tmp_path, "7", "1000 0 0 0", "10 ")
    process(tmp_path, "8", "5 0 0 0", None)  # it ended while it was read
    process(tmp_path, "10", "0 2000 0 0", "")
    assert process_tree_seconds(tmp_path) == pytest.approx((154 + 1000 + 2000) / HZ)
    with pytest.raises(FileNotFoundError):  # a kernel without these lists: the children would be taken for others
        process_tree_seconds(tmp_path, "8")


def test_a_thread_that_ends_while_the_children_are_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a loader end beside the training thread, which reads: the sum is known all the same."""
    process(tmp_path, "self", "100 20 30 4", "7 ")
    process(tmp_path, "7", "1000 0 0 0", "")
    ended = tmp_path / "self" / "task" / "99" / "children"
    ended.parent.mkdir()
    ended.touch()
    read_text = Path.read_text

    def read(path: Path) -> str:
        if path == ended:
            raise ProcessLookupError
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    assert process_tree_seconds(tmp_path) == pytest.approx((154 + 1000) / HZ)


def test_a_child_that_computes_is_the_runs_own() -> None:
    before = process_tree_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert process_tree_seconds() - before >= 0.25


def test_this_machine() -> None:
    assert (load := Load.now().load) is not None
    assert load >= 0
