"""One bad record does not prevent the report of the others: it is a row with a reason, or a warning that names it."""

from __future__ import annotations

import csv
import os
import re
import shutil
from io import StringIO
from itertools import product
from xml.etree import ElementTree

import pytest

from ddlbench.report.__main__ import main
from ddlbench.report.overview import summary_text
from ddlbench.texts import printable
from tests.support import hostile
from tests.support.records import edited, tables_of, write_run

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")
OWN = ("framework", "gpus", "runs_ok", "sample_time_s", "epoch_time_s", "speedup", "val_top1", "mfu")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a good run, and the rows of that run while nothing is beside it."""
    results = tmp_path_factory.mktemp("results")
    return results, good_run(results)


@pytest.fixture
def beside(good):
    """The same, for a test that writes runs beside it; they are removed at its end."""
    own = set(good[0].iterdir())
    yield good
    for folder in set(good[0].iterdir()) - own:
        shutil.rmtree(folder)


def good_run(results):
    write_run(results, framework="good")
    return rows_of_good(written(tables_of(results), results / "report"))


def written(tables, folder):
    """The rows of the files of the tables."""
    tables.write(folder)
    return [[*csv.DictReader(StringIO((folder / f"{name}.csv").read_text()))] for name in ("runs", "scaling", "epochs")]


def rows_of_good(tables):
    (run,), (scaling,), epochs = ([row for row in rows if row["framework"] == "good"] for rows in tables)
    return run, {name: scaling[name] for name in OWN}, epochs


def check(results, alone):
    """The tables are made, the good run is in them as if it were alone, nothing printed controls a terminal."""
    tables = tables_of(results)
    rows = written(tables, results / "report")
    texts = [path.read_text() for path in (results / "report").iterdir()]
    text = "\n".join([summary_text(tables.measurements), *texts, *tables.warnings])
    assert not CONTROL.search(text), CONTROL.search(text)
    assert len(rows[0]) == len(tables.runs), "no text breaks a line of the table"
    assert rows_of_good(rows) == alone
    return tables


@pytest.mark.parametrize("field", [*hostile.SECTIONS, *hostile.NAMES, *hostile.MEASURED])
def test_any_value_in_any_place_of_a_record(beside, field):
    results, alone = beside
    folders = [hostile.odd_record(results, field, value, n) for n, value in enumerate(hostile.VALUES)]
    tables = check(results, alone)
    assert len(tables.runs) == 1 + len(folders)
    if field in hostile.MEASURED:
        expected_warnings(tables, folders, field, hostile.MEASURED[field])


@pytest.mark.parametrize("field", hostile.EPOCH_FIELDS)
def test_any_value_in_a_line_of_epochs(beside, field):
    results, alone = beside
    folders = [hostile.odd_epoch(results, field, value, n) for n, value in enumerate(hostile.VALUES)]
    tables = check(results, alone)
    if field != "epoch":
        expected_warnings(tables, folders, field, hostile.EPOCH_FIELDS[field])


def expected_warnings(tables, folders, field, ends):
    column = field.rpartition(".")[2].replace("world_size", "gpus")
    for folder, value in zip(folders, hostile.VALUES, strict=True):
        notes = [text for text in tables.warnings if text.startswith(f"{folder}: left out of the tables: {column} = ")]
        assert len(notes) == (not hostile.fits(field, value, ends)), (str(value)[:20], notes)


def test_any_kind_of_file():
    with hostile.without_privileges() as results:
        alone = good_run(results)
        folders = [write_run(results, framework="odd", repeat=n, attempt=2) for n in range(len(hostile.FILES))]
        for folder, (_, make) in zip(folders, hostile.FILES.values(), strict=True):
            make(folder)
        tables = check(results, alone)
        status_of = statuses(tables)
        for folder, (kind, (said, _)) in zip(folders, hostile.FILES.items(), strict=True):
            of_epochs = kind.startswith("epochs")
            own = [text for text in tables.warnings if text.startswith(f"{folder}: ")]
            others = [text for text in own if not text.startswith(f"{folder}: the summary is left out: epochs_done = ")]
            assert [said in text for text in others] == [True], kind
            assert len(own) - len(others) == (of_epochs and kind != "epochs twice"), kind
            assert status_of[str(folder)] == ("ok" if of_epochs else "unreadable"), kind
        assert all(text.startswith(tuple(f"{folder}: " for folder in folders)) for text in tables.warnings)


def statuses(tables):
    return dict(zip(tables.runs["path"], tables.runs["status"], strict=True))


def test_any_name_of_a_folder(beside):
    """With and without the record in it."""
    results, alone = beside
    names = list(product(hostile.FOLDERS, (True, False)))
    folders = [write_run(results, framework="odd", repeat=n, attempt=2) for n in range(len(names))]
    folders = [folder.rename(folder.with_name(name)) for folder, (name, _) in zip(folders, names, strict=True)]
    for folder in folders[1::2]:
        (folder / "run.json").unlink()
    tables = check(results, alone)
    status_of = statuses(tables)
    for folder, (name, whole) in zip(folders, names, strict=True):
        path = printable(str(folder))
        assert status_of[path] == ("ok" if whole else "unreadable"), ascii(name)
        assert whole or any(text.startswith(path) for text in tables.warnings), ascii(name)


def test_a_run_folder_of_any_name(beside):
    results, alone = beside
    for number, name in enumerate((os.fsdecode(b"run-\xff"), "=run", "run\x1b[2J", "run\nx", "$run$", "r" * 250)):
        folder = write_run(results, framework="odd", repeat=number).parent
        folder = folder.rename(folder.with_name(name))
        (folder / "attempt-1" / "run.json").write_text("{")
    tables = check(results, alone)
    assert list(tables.runs["status"]).count("unreadable") == 6
    assert "'=run" in (results / "report" / "runs.csv").read_text()


def test_a_folder_that_may_not_be_entered_is_named():
    with hostile.without_privileges() as results:
        alone = good_run(results)
        closed = [results / "closed", write_run(results, framework="odd")]
        closed[0].mkdir()
        for folder in closed:
            folder.chmod(0)
        tables = check(results, alone)
        for folder in closed:
            folder.chmod(0o700)
    warnings = sorted(tables.warnings)
    assert warnings == [
        f"{closed[0]} cannot be read (Permission denied)",
        f"{closed[1]}: run.json cannot be read (Permission denied)",
    ]


def test_nothing_readable_is_one_line(capsys):
    with hostile.without_privileges() as results:
        closed = results / "closed"
        closed.mkdir(mode=0)
        assert main([str(closed)]) == 2
        err = capsys.readouterr().err
        assert err == f"ddlbench.report: {closed} cannot be read (Permission denied): ask the owner for access\n"
        assert main([str(results)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"no run in {results} ({closed} cannot be read (Permission denied)): start one with python -m" in err
        assert not (results / "report").exists()
        assert main([str(closed / "within")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_program_error_of_one_record_is_a_row_too(beside, monkeypatch):
    """An error that no check foresees."""
    results, alone = beside
    folder = write_run(results, framework="odd")
    import ddlbench.results.tables.run_rows as module

    reference = module.measured_options

    def faulty(config, before):
        return 1 / (config.get("framework") != {}) and reference(config, before)

    monkeypatch.setattr(module, "measured_options", faulty)
    with edited(folder) as record:
        record["config"]["framework"] = {}
    tables = check(results, alone)
    assert tables.warnings == [f"{folder}: the values of run.json cannot be used (ZeroDivisionError: division by zero)"]


ODD = (
    *(("config.framework.name", value) for value in hostile.TEXTS),
    *(("config.framework.bucket_cap_mb", value) for value in hostile.TEXTS[:12]),
    *((f"config.{group}.name", value) for group in ("model", "loader") for value in ("$x_{$", "你好", "x" * 100_000)),
    *(("launch.device_type", value) for value in ("tpu", None)),
    *(("status", value) for value in hostile.TEXTS),
    *(("environment.driver", value) for value in hostile.TEXTS),
    *(("framework", value) for value in hostile.OTHERS),
    *(("summary.throughput_samples_per_s", value) for value in hostile.NUMBERS),
    *(("launch.world_size", value) for value in hostile.NUMBERS),
    *(("summary.memory_host_peak_bytes", value) for value in hostile.NUMBERS),
)


def test_the_whole_report_of_many_of_them(tmp_path, capsys, monkeypatch):
    """Tables, figures and page through the command, with warnings as errors. All curves are in a few panels, which take
    less time than many; names of loaders are in the lines above panels of their own."""
    monkeypatch.setattr("ddlbench.figures.panels.MOST_CURVES", 100)
    write_run(tmp_path, framework="good")
    for number, (field, value) in enumerate(ODD):
        hostile.odd_record(tmp_path, field, value, number)
    for number, (field, value) in enumerate(product(hostile.EPOCH_FIELDS, (*hostile.NUMBERS, "NaN", None))):
        hostile.odd_epoch(tmp_path, field, value, 1000 + number)
    for number, section in enumerate(hostile.SECTIONS):
        with edited(write_run(tmp_path, framework="lacking", repeat=number)) as record:
            record.pop(section, None)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert not CONTROL.search(said.out + said.err)
    assert max(map(len, said.out.splitlines())) <= 1100, "no line is longer than the settings of a row"
    assert re.search(r"(?m)^good +resnet50 ", said.out)
    assert "warnings are in the report" in said.err
    page = (tmp_path / "report" / "report.html").read_text()
    assert not CONTROL.search(page)
    assert "<script>" not in page
    for figure in (tmp_path / "report" / "figures").glob("*.svg"):
        ElementTree.parse(figure)
