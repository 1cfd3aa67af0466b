"""ddlbench-exchange: what an import adds and leaves out, and nothing twice; logs of an export, which MLPerf's own tools
read and which give the record's numbers back."""

from __future__ import annotations

import importlib.util
import json
import shutil
from datetime import datetime

import pytest

from ddlbench.exchange.__main__ import main
from ddlbench.report.__main__ import main as report
from ddlbench.results.reading.mlperf import Log
from tests.support.processes import PYTHON, run
from tests.support.published import URL, cells, events, write_csv, write_results
from tests.support.records import edited, tables_of, write_repeats, write_run


@pytest.fixture
def csv_file(tmp_path):
    return write_csv(tmp_path / "points.csv", cells(), cells(model="VGG-16"), cells(gpu_type="XPU"))


def imported(results, *arguments):
    """The exit code of an import."""
    return main(["import", *map(str, arguments), "--into", str(results)])


def lines(folder):
    return [json.loads(line) for line in (folder / "published.jsonl").read_text().splitlines()]


def test_importing_twice_adds_nothing(tmp_path, csv_file, capsys):
    assert imported(tmp_path / "results", csv_file) == 0
    first = (tmp_path / "results" / "published.jsonl").read_bytes()
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'results'}: 2 published measurements added, 0 were there; 1 line on what is left out\n"
    assert err == f"left out: {csv_file}: row 4: unknown GPU 'XPU'\n"
    assert imported(tmp_path / "results", csv_file) == 0
    assert (tmp_path / "results" / "published.jsonl").read_bytes() == first
    assert "0 published measurements added, 2 were there" in capsys.readouterr().out


def test_rows_without_a_base_are_named(tmp_path, capsys):
    without = [cells(model=name, base_gpus="", base_value="") for name in ("VGG-16", "VGG-19")]
    file = write_csv(tmp_path / "points.csv", cells(), *without)
    assert imported(tmp_path / "results", file) == 0
    assert capsys.readouterr().err == f"{file}: row 3, 4: without a base: efficiency stays empty\n"


def test_logs_and_the_row_that_was_made_of_them(tmp_path, capsys):
    logs = write_results(tmp_path / "logs" / "2xExample", events(), events(top1=0.4))
    assert imported(tmp_path / "results", logs.parent, "--url", URL, "--strategy", "horovod") == 0
    row = write_csv(tmp_path / "row.csv", cells(url=f"{URL}/2xExample/resnet/result_0.txt"))
    assert imported(tmp_path / "results", row) == 1
    assert imported(tmp_path / "at once", logs.parent, row, "--url", URL) == 0
    assert len(lines(tmp_path / "at once")) == 2
    assert f"its source is imported already as {URL}/2xExample" in capsys.readouterr().err
    assert [record["config"]["train"]["repeat"] for record in lines(tmp_path / "results")] == [0, 1]


def test_another_value_of_the_same_configuration_is_named(tmp_path, csv_file, capsys):
    assert imported(tmp_path / "results", csv_file) == 0
    other = write_csv(tmp_path / "other.csv", cells(measured=761, step_ms=""))
    assert imported(tmp_path / "results", other) == 1
    assert "is another value of its configuration and repeat" in capsys.readouterr().err
    assert len(lines(tmp_path / "results")) == 2


def test_a_row_that_repeats_another_one_is_named(tmp_path, capsys):
    mirror = cells(url="https://example.org/mirror", quote="x")
    path = write_csv(tmp_path / "points.csv", cells(), mirror, cells(model="VGG-16"))
    assert imported(tmp_path / "results", path) == 0
    assert "(https://example.org/mirror): it is given twice" in capsys.readouterr().err
    assert len(lines(tmp_path / "results")) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["nothing.csv"], 2, "cannot be read (No such file or directory)"),
        (["other.csv"], 2, "has other columns"),
        (["logs"], 2, "give --url"),
        (["empty", "--url", URL], 2, "has no result_0.txt"),
        (["logs", "--url", URL], 1, "left out: logs/result_0.txt: broken time stamps: run_stop is not"),
    ],
)
def test_nothing_to_import(tmp_path, monkeypatch, capsys, arguments, code, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    broken = events()
    broken[-1]["time_ms"] = 5
    write_results(tmp_path / "logs", broken)
    assert imported("results", *arguments) == code
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_file_with_other_lines_is_not_written_over(tmp_path, csv_file, capsys):
    (tmp_path / "published.jsonl").write_text("notes\n")
    assert imported(tmp_path, csv_file) == 2
    assert "repair or remove it" in capsys.readouterr().err
    assert (tmp_path / "published.jsonl").read_text() == "notes\n"


def test_a_report_of_own_and_published_measurements_says_which_is_which(tmp_path, csv_file, capsys):
    write_run(tmp_path / "results", status="error", reason="boom")  # nothing of it is drawn
    assert imported(tmp_path / "results", csv_file) == 0
    capsys.readouterr()
    assert report([str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    for line in out.splitlines():
        assert not ("DDP" in line and "ResNet-50" in line) or "published" in line, line
    page = (tmp_path / "results" / "report" / "report.html").read_text()
    assert "ResNet-50 (published), Example 2020" in page
    assert (tmp_path / "results" / "report" / "figures" / "efficiency_by_source.png").exists()


def test_published_rows_take_no_part_in_a_gate(tmp_path, csv_file, capsys):
    for name, rate in (("before", 100.0), ("after", 50.0)):
        write_repeats(tmp_path / name, *(rate + repeat / 100 for repeat in range(6)))
        assert imported(tmp_path / name, csv_file) == 0
    capsys.readouterr()
    assert report(["--compare", str(tmp_path / "before"), str(tmp_path / "after"), "--fail-if-slower", "5%"]) == 1
    out, err = capsys.readouterr()
    assert "ResNet-50" not in out
    assert "before: 2 published measurements are not compared" in err


needs_checker = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="needs MLPerf's checker: pip install 'ddlbench[mlperf]'"
)
GPU = {"environment": {"gpu_model": "NVIDIA A100-SXM4-40GB", "git_commit": "0123"}, "spans": {"setup_s": 30.0}}


def exported(tmp_path):
    assert main(["export", str(tmp_path / "own"), "--out", str(tmp_path / "logs")]) == 0
    return sorted((tmp_path / "logs").rglob("result_*.txt"))


def test_a_log_has_the_seconds_of_the_record(tmp_path):
    write_run(tmp_path / "own", rate=100, gpus=4, sections=GPU)
    (path,) = exported(tmp_path)
    log = Log(path.read_bytes())
    assert log.run.ms == 3 * (10_240 + 2_000)
    assert [epoch["epoch_time_s"] for epoch in log.epochs()] == [10.24] * 3
    assert [epoch["val_top1"] for epoch in log.epochs()] == pytest.approx([0.3, 0.55, 0.8 - 0.5 / 3])
    start = log.one("init_start").ms
    assert log.one("init_stop").ms - start == 30_000
    assert "not an MLPerf submission" in log.one("submission_org").value
    assert json.loads((path.parent / "system.json").read_text())["submitter"] == "none: not an MLPerf submission"


def test_the_description_of_a_system_has_no_unknown_values(tmp_path):
    with edited(write_run(tmp_path / "own", gpus=4)) as record:
        del record["launch"]["nodes"], record["launch"]["ranks_per_node"]
    (path,) = exported(tmp_path)
    system = json.loads((path.parent / "system.json").read_text())
    assert system.keys().isdisjoint({"number_of_nodes", "accelerators_per_node"})
    assert all(type(value) is str and "None" not in value for value in system.values())


def test_the_start_of_a_record_lies_after_the_preparation_of_the_data(tmp_path):
    """Rank 0 opens the record then: its time stamp is not that of the program's start."""
    spans = {"imports_s": 5.0, "connecting_s": 2.0, "data_preparation_s": 60.0, "staging_s": 20.0, "setup_s": 30.0}
    sections = {"spans": spans, "preflight": {"seconds": 3.0}}
    folder = write_run(tmp_path / "own", gpus=4, sections=sections)
    opened = datetime.fromisoformat(json.loads((folder / "run.json").read_text())["times"]["start"]).timestamp()
    (path,) = exported(tmp_path)
    log = Log(path.read_bytes())
    times = [log.one(name).ms / 1000 - opened for name in ("submission_org", "init_start", "init_stop", "run_start")]
    assert times == pytest.approx([-67.0, -67.0, 53.0, 53.0])


def test_what_is_exported_can_be_imported(tmp_path):
    for repeat in range(2):
        write_run(tmp_path / "own", rate=100 + repeat, gpus=4, repeat=repeat, sections=GPU)
    assert [path.name for path in exported(tmp_path)] == ["result_0.txt", "result_1.txt"]
    arguments = ["--url", "https://example.org", "--into", str(tmp_path / "back")]
    assert main(["import", str(tmp_path / "logs"), *arguments]) == 0
    (before,), (after,) = (tables_of(tmp_path / name).measurements for name in ("own", "back"))
    names = ("gpus", "nodes", "runs_ok", "global_batch", "device_model")
    assert [after[name] for name in names] == [before[name] for name in names]
    assert after["sample_time_s"] == pytest.approx(before["sample_time_s"], rel=1e-4)  # milliseconds of 10 s
    assert after["val_top1"] == before["val_top1"]


def test_a_second_export_leaves_no_log_of_a_run_that_is_gone(tmp_path):
    _, second = (write_run(tmp_path / "own", repeat=repeat, sections=GPU) for repeat in range(2))
    assert len(exported(tmp_path)) == 2
    shutil.rmtree(second)
    assert [log.name for log in exported(tmp_path)] == ["result_0.txt"]


def test_runs_without_a_log_are_named(tmp_path, capsys):
    write_run(tmp_path / "own", gpus=2)
    write_run(tmp_path / "own", gpus=4, status="oom", reason="out of memory")
    write_run(tmp_path / "own", gpus=8, sections={"times": {}})
    source = write_csv(tmp_path / "points.csv", cells())
    assert main(["import", str(source), "--into", str(tmp_path / "own")]) == 0
    assert len(exported(tmp_path)) == 1
    err = capsys.readouterr().err
    assert "it is no training that ended ok (mode train, status oom)" in err
    assert "its record lacks its start" in err


def test_nothing_to_export(tmp_path, capsys):
    write_run(tmp_path / "own", status="killed", reason="x")
    assert main(["export", str(tmp_path / "own"), "--out", str(tmp_path / "logs")]) == 1
    assert not (tmp_path / "logs").exists()


@needs_checker
@pytest.mark.parametrize("ruleset", ["1.0.0", "4.0.0"])
def test_the_checker_of_mlperf_accepts_the_log_of_a_resnet50(tmp_path, ruleset):
    write_run(tmp_path / "own", gpus=4, summary={"val_samples": 500}, sections=GPU)
    (path,) = exported(tmp_path)
    checker = (PYTHON, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset)
    done = run(*checker, "--log_output", str(tmp_path / "checker.log"), str(path))
    assert (done.returncode, "SUCCESS" in done.stderr) == (0, True), done.stderr
