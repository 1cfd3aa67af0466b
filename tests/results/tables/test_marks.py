"""The reasons to doubt a row are beside it, and their explanations are below the table."""

from __future__ import annotations

import html

from ddlbench.figures.figures import Drawing
from ddlbench.report.documents import render
from ddlbench.report.overview import summary_text
from ddlbench.results.tables.checks import marks_explained, marks_of
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.tables import records
from tests.support.records import tables_of, write_run

NOTHING = {"marks": None, "reference": None, "ranks_differ": None, "straggler_rank": None, "straggler_host": None}


def test_a_run_has_its_own_marks_those_of_its_ranks_and_its_straggler():
    assert marks_of(NOTHING) == {}
    odd = {"marks": "throttled; steal", "ranks_differ": "torch (2.13: rank 1)", "straggler_rank": 0}
    texts = {name: name for name in ("throttled", "steal", "ranks differ")}
    assert marks_of(NOTHING | odd) == texts | {"straggler": "straggler rank 0"}
    assert marks_of(NOTHING | odd | {"straggler_host": "node2"})["straggler"] == "straggler rank 0 on node2"


def marked_tables(results):
    """ddp on 1, 2 and 4 GPUs: all three runs on 4 are marked, one on 2, none on 1."""
    for repeat in range(3):
        write_run(results, repeat=repeat)
        write_run(results, gpus=2, repeat=repeat, summary={"marks": "load" if repeat else None})
        slow = {"marks": "load; steal", "straggler_rank": 3, "straggler_host": "node2"}
        write_run(results, gpus=4, repeat=repeat, summary=slow, sections={"ranks_differ": ["torch"]})
    return tables_of(results)


def test_a_mark_counts_the_runs_that_ended_ok(tmp_path):
    for repeat, marks in enumerate(("load", None, "load")):
        write_run(tmp_path, repeat=repeat, summary={"marks": marks})
    write_run(tmp_path, repeat=3, status="killed", sections={"summary": {"marks": "load; steal"}})
    (row,) = records(tables_of(tmp_path).scaling)
    assert row["marks"] == "load (2 of 3)"


LINES = (
    "!1 load (2 of 3)",
    "!2 load (3 of 3); ranks differ (3 of 3); steal (3 of 3); straggler rank 3 on node2 (3 of 3)",
    "load: programs that are not of the run computed on the host",
    "steal: the hypervisor gave the cores to other machines",
)


def test_the_terminal_marks_the_row_and_explains_below(tmp_path):
    text = summary_text(marked_tables(tmp_path).measurements)
    lines = [line.split() for line in text.splitlines()]
    n = lines[0].index("n")
    assert lines[0][n + 1] == "!"
    rows = {line[n - 3]: line[n + 1] for line in lines if line[:1] == ["ddp"] and "ok" in line}
    assert rows == {"1": "10.2", "2": "!1", "4": "!2"}, "the row without a mark goes on with its epoch time"
    for line in LINES:
        assert f"\n{line}\n" in text
    assert "throttled" not in text


def test_the_page_has_both_too(tmp_path):
    tables = marked_tables(tmp_path)
    page = html.unescape(render(tables, Drawing(), tmp_path))
    assert page.count('<td data-name="!" class="number">!1</td>') == 1
    assert page.count('<td data-name="!" class="number">!2</td>') == 1
    for line in LINES:
        assert f"<li>{line}</li>" in page
    assert sorted(map(str, (row["marks"] for row in records(tables.scaling))))[0] == "None"


def test_many_different_marks_are_counted():
    rows = [
        Measurement({"marks": f"straggler rank {n} (1 of 1)"}, mark_names=["straggler"], marks_number=f"!{n + 1}")
        for n in range(25)
    ]
    lines = marks_explained(rows)
    assert lines[19:21] == ["!20 straggler rank 19 (1 of 1)", "and 5 more: see marks in scaling.csv"]
    assert lines[21].startswith("straggler: its own step")


def test_it_is_said_which_straggler_could_not_be_found(tmp_path):
    """On a GPU without a profiled window a rank's own step is not known; on a CPU it has no sleep in it. One rank alone
    makes no other wait."""

    def remarks():
        lines = summary_text(tables_of(tmp_path).measurements).splitlines()
        return [line for line in lines if line.startswith("stragglers")]

    write_run(tmp_path, gpus=1)
    own = {"own_step_s": 0.5, "own_step_median_rank_s": 0.4}
    write_run(tmp_path, gpus=2, summary=own | {"own_step_source": "window"})
    assert remarks() == []
    write_run(tmp_path, gpus=4)
    write_run(tmp_path, gpus=16, status="oom", reason="out of memory")
    unknown = (
        "stragglers: not looked for in 1 of 2 measurements on several ranks, whose own steps are not known: "
        "profile=true measures them"
    )
    assert remarks() == [unknown]
    write_run(tmp_path, gpus=8, summary=own | {"own_step_source": "thread"})
    assert remarks() == [
        unknown.replace("1 of 2", "1 of 3"),
        "stragglers on the CPU: by the time that ranks computed; one that sleeps or waits for a disk shows with "
        "profile=true alone",
    ]
