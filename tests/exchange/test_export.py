"""ddlbench-exchange export: logs that MLPerf's own tools read, and that give the record's numbers back."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime

import pytest

from ddlbench.exchange.__main__ import main
from ddlbench.results.reading.mlperf import Log
from tests.support import records
from tests.support.processes import PYTHON, run
from tests.support.published import cells, write_csv
from tests.support.records import tables_of

needs_checker = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="needs MLPerf's checker: pip install 'ddlbench[mlperf]'"
)
GPU = {"environment": {"gpu_model": "NVIDIA A100-SXM4-40GB", "git_commit": "0123"}, "spans": {"setup_s": 30.0}}


def exported(tmp_path):
    assert main(["export", str(tmp_path / "own"), "--out", str(tmp_path / "logs")]) == 0
    return sorted((tmp_path / "logs").rglob("result_*.txt"))


def test_a_log_has_the_seconds_of_the_record(tmp_path):
    records.write_run(tmp_path / "own", rate=100, gpus=4, sections=GPU)
    (path,) = exported(tmp_path)
    log = Log(path.read_bytes())
    assert log.run.ms == 3 * (10_240 + 2_000)
    assert [epoch["epoch_time_s"] for epoch in log.epochs()] == [10.24] * 3
    assert [epoch["val_top1"] for epoch in log.epochs()] == pytest.approx([0.3, 0.55, 0.8 - 0.5 / 3])
    start = log.one("init_start").ms
    assert log.one("init_stop").ms - start == 30_000
    assert "not an MLPerf submission" in log.one("submission_org").value
    assert json.loads((path.parent / "system.json").read_text())["submitter"] == "none: not an MLPerf submission"


def test_the_start_of_a_record_lies_after_the_preparation_of_the_data(tmp_path):
    """Rank 0 opens the record then: its time stamp is not that of the program's start."""
    spans = {"imports_s": 5.0, "connecting_s": 2.0, "data_preparation_s": 60.0, "staging_s": 20.0, "setup_s": 30.0}
    sections = {"spans": spans, "preflight": {"seconds": 3.0}}
    folder = records.write_run(tmp_path / "own", gpus=4, sections=sections)
    opened = datetime.fromisoformat(json.loads((folder / "run.json").read_text())["times"]["start"]).timestamp()
    (path,) = exported(tmp_path)
    log = Log(path.read_bytes())
    times = [log.one(name).ms / 1000 - opened for name in ("submission_org", "init_start", "init_stop", "run_start")]
    assert times == pytest.approx([-67.0, -67.0, 53.0, 53.0])


def test_what_is_exported_can_be_imported(tmp_path):
    for repeat in range(2):
        records.write_run(tmp_path / "own", rate=100 + repeat, gpus=4, repeat=repeat, sections=GPU)
    assert [path.name for path in exported(tmp_path)] == ["result_0.txt", "result_1.txt"]
    arguments = ["--url", "https://example.org", "--into", str(tmp_path / "back")]
    assert main(["import", str(tmp_path / "logs"), *arguments]) == 0
    (before,), (after,) = (tables_of(tmp_path / name).measurements for name in ("own", "back"))
    names = ("gpus", "nodes", "runs_ok", "global_batch", "device_model")
    assert [after[name] for name in names] == [before[name] for name in names]
    assert after["sample_time_s"] == pytest.approx(before["sample_time_s"], rel=1e-4)  # milliseconds of 10 s
    assert after["val_top1"] == before["val_top1"]


def test_runs_without_a_log_are_named(tmp_path, capsys):
    records.write_run(tmp_path / "own", gpus=2)
    records.write_run(tmp_path / "own", gpus=4, status="oom", reason="out of memory")
    records.write_run(tmp_path / "own", gpus=8, sections={"times": {}})
    source = write_csv(tmp_path / "points.csv", cells())
    assert main(["import", str(source), "--into", str(tmp_path / "own")]) == 0
    assert len(exported(tmp_path)) == 1
    err = capsys.readouterr().err
    assert "it is no training that ended ok (mode train, status oom)" in err
    assert "its record lacks its start" in err


def test_nothing_to_export(tmp_path, capsys):
    records.write_run(tmp_path / "own", status="killed", reason="x")
    assert main(["export", str(tmp_path / "own"), "--out", str(tmp_path / "logs")]) == 1
    assert not (tmp_path / "logs").exists()


@needs_checker
@pytest.mark.parametrize("ruleset", ["1.0.0", "4.0.0"])
def test_the_checker_of_mlperf_accepts_the_log_of_a_resnet50(tmp_path, ruleset):
    records.write_run(tmp_path / "own", gpus=4, summary={"val_samples": 500}, sections=GPU)
    (path,) = exported(tmp_path)
    checker = (PYTHON, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset)
    done = run(*checker, "--log_output", str(tmp_path / "checker.log"), str(path))
    assert (done.returncode, "SUCCESS" in done.stderr) == (0, True), done.stderr
