"""ddlbench-exchange import: what is added, what is left out, and nothing twice."""

from __future__ import annotations

import json

import pytest

from ddlbench.exchange.__main__ import main
from ddlbench.report.__main__ import main as report
from tests.support.published import URL, cells, events, write_csv, write_results
from tests.support.records import write_repeats, write_run


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
