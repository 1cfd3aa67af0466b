"""The command: tables, figures and a page from any number of runs, or one line that says why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pandas as pd
import pytest

from ddlbench.figures.figures import Drawing
from ddlbench.report.__main__ import main
from ddlbench.report.documents import render
from tests.support.records import strong_scaling, tables_of, weak_scaling, write_run


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("href", "src")]
        self.ids |= {value for name, value in attrs if name == "id"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a report of both kinds of scaling, made by a program without a display whose warnings are errors;
    and what it printed."""
    results = tmp_path_factory.mktemp("results")
    weak_scaling(results)
    strong_scaling(results)
    command = [sys.executable, "-W", "error", "-m", "ddlbench.report", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"DISPLAY": ""})
    assert done.returncode == 0, done.stderr
    return results / "report", done.stdout, done.stderr


@pytest.fixture(scope="module")
def page(report):
    return (report[0] / "report.html").read_text()


def failed_run(results, **others):
    """A record without measurements, so that the report is quick."""
    return write_run(results, status="error", reason="boom", **others)


def refusal(capsys, *arguments):
    """The line that refuses to make a report."""
    assert main([str(argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_report_holds_tables_figures_and_what_was_printed(report):
    folder, out, err = report
    tables = sorted(path.name for path in (folder / "tables").iterdir())
    assert tables == [
        "breakdown.csv", "epochs.csv", "learning.csv", "runs.csv", "scaling.csv", "summary.md", "summary.tex",
    ]  # fmt: skip
    figures = {path.name for path in (folder / "figures").iterdir()}
    for name in ("throughput", "speedup", "efficiency", "memory", "accuracy_by_epoch", "accuracy_by_time"):
        assert {f"{name}.png", f"{name}.svg"} <= figures
    assert len(pd.read_csv(folder / "tables" / "runs.csv")) == 8
    assert out.startswith("framework")
    assert out.rstrip().endswith(f"report: {folder / 'report.html'}")
    assert err == ""


def test_the_page_needs_no_network(report, page):
    links = Links()
    links.feed(page)
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page)
    assert "@import" not in page
    for link in links.addresses:
        if link.startswith("#"):
            assert link[1:] in links.ids
        elif not link.startswith("data:image/svg+xml;base64,"):
            assert (report[0] / link).is_file(), link
    assert sum(link.startswith("data:") for link in links.addresses) == 12


def test_every_table_and_image_scrolls_inside_the_page(page):
    tables = re.findall(r"(<div class=\"[^\"]*scroll[^\"]*\"[^>]*>)?<table", page)
    assert tables
    assert all(tables), "each in a box of its own"
    assert page.count("<img ") == page.count('<div class="sideways"')


def test_the_page_begins_with_the_summary_in_words(page):
    assert 0 < page.index('<p class="best">') < page.index("<table")


def test_the_page_has_failures_bases_and_how_it_was_measured(page):
    assert "CUDA out of memory" in page
    assert "base single@1, resnet50, 32 samples an update: 10.0 ms a sample, epoch 10.2 s" in page
    assert "perf_counter" in page
    assert "Example GPU 80GB" in page
    assert "no 95 % CI" in page


def test_what_an_earlier_report_drew_of_other_options_is_gone(tmp_path):
    write_run(tmp_path)
    run_id = next(path.parent.name for path in tmp_path.rglob("attempt-1"))
    assert main([str(tmp_path), "--target", "val_top1=0.5", "--explain", run_id, "--pdf"]) == 0
    tables, figures = tmp_path / "report" / "tables", tmp_path / "report" / "figures"
    made = {path.name for path in (*tables.iterdir(), *figures.iterdir())}
    assert {"targets.csv", "explain.csv", "explain.pdf", "epochs_to_val_top1=0.5.svg", "memory.pdf"} <= made
    (figures / "own.png").write_text("")
    assert main([str(tmp_path)]) == 0
    left = {name for name in made if not re.search(r"\.pdf$|^explain|^targets|_to_", name)}
    assert {path.name for path in (*tables.iterdir(), *figures.iterdir())} == left | {"own.png"}


def test_several_folders_and_an_out_of_choice(tmp_path):
    failed_run(tmp_path / "a")
    failed_run(tmp_path / "b", gpus=2)
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "deep" / "out")]) == 0
    assert list(pd.read_csv(tmp_path / "deep" / "out" / "tables" / "runs.csv")["gpus"]) == [1, 2]


def test_several_folders_without_an_out_leave_the_first_ones_report_as_it_is(tmp_path, capsys):
    for name in ("a", "b"):
        failed_run(tmp_path / name)
    kept = tmp_path / "a" / "report" / "report.html"
    kept.parent.mkdir()
    kept.write_text("of a alone")
    said = refusal(capsys, tmp_path / "a", tmp_path / "b")
    assert "2 results folders needs a folder of its own: give --out DIR" in said
    assert kept.read_text() == "of a alone"


def test_only_unreadable_records_are_a_report_of_failures(tmp_path, capsys):
    folder = write_run(tmp_path, sections={"schema_version": 0})
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    page, refused = (tmp_path / "report" / "report.html").read_text(), "schema_version 0 is refused"
    assert "no attempt has a configuration" in out
    assert "the report lists the failures" in out
    assert err.startswith(f"warning: {folder}: {refused}")
    assert refused in page
    assert "\nleft out: 1 of an older schema\n" in out
    assert "<p>left out: 1 of an older schema." in page
    assert len(pd.read_csv(tmp_path / "report" / "tables" / "runs.csv")) == 1


def test_an_out_that_cannot_be_written_is_one_line_with_the_remedy(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "file").write_text("")
    said = refusal(capsys, tmp_path, "--out", tmp_path / "file" / "out")
    assert "cannot be written (Not a directory): choose another folder with --out" in said


def test_doubtful_timings_have_a_warning(tmp_path):
    write_run(tmp_path, summary={"allocator_retries": 3}, sections={"environment": {"git_dirty": True}})
    page = render(tables_of(tmp_path), Drawing(), tmp_path)
    assert "3 allocator retries made the timing unreliable" in page
    assert "1 attempt(s) ran with uncommitted changes" in page
