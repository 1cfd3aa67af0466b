"""What makes numbers doubtful is named: the reasons to doubt a row, frameworks that changed what is trained,
efficiencies above 100 %, drift."""

from __future__ import annotations

import html
from typing import Any

import pytest

from ddlbench.figures.figures import Drawing
from ddlbench.frameworks.ddp import COMPRESSED
from ddlbench.measure.marks import MARKS
from ddlbench.report.documents import render
from ddlbench.report.overview import summary_text
from ddlbench.results.tables.checks import drift, marks_explained, marks_of
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.merge import AttemptRow
from ddlbench.results.tables.tables import records
from tests.support.records import tables_of, write_repeats, write_run

NAMES = ("marks", "reference", "ranks_differ", "straggler_rank", "straggler_host")
UPDATES = ("staleness_max", "staleness_theoretical_max", "framework_facts")
NOTHING: dict[str, Any] = dict.fromkeys((*NAMES, *UPDATES))


def test_a_run_has_its_own_marks_those_of_its_ranks_and_its_straggler():
    assert marks_of(NOTHING) == {}
    odd = {"marks": "throttled; steal", "ranks_differ": "torch (2.13: rank 1)", "straggler_rank": 0}
    texts = {name: name for name in ("throttled", "steal", "ranks differ")}
    assert marks_of(NOTHING | odd | {"reference": "noop"}).keys() <= MARKS.keys(), "a report explains every mark"
    assert marks_of(NOTHING | odd) == texts | {"straggler": "straggler rank 0"}
    assert marks_of(NOTHING | odd | {"straggler_host": "node2"})["straggler"] == "straggler rank 0 on node2"


LATE = [{"staleness": [0, 2]}, {"staleness_theoretical": [1, 0]}, {"local_steps": 8}]
OTHER = [*LATE, *({"comm_hook": hook} for hook in COMPRESSED), {"adasum": True}]
EQUAL = [{"staleness": 0}, {"tp": 2}, {"comm_hook": "none"}, {"comm_hook": "bf16"}, {"adasum": False}]


@pytest.mark.parametrize(
    ("facts", "other"), [*((facts, True) for facts in OTHER), *((facts, False) for facts in EQUAL)], ids=str
)
def test_a_framework_with_late_averaged_or_compressed_updates_has_a_mark(tmp_path, facts, other):
    write_run(tmp_path, sections={"framework": {"name": "ddp", **facts}})
    (row,) = records(tables_of(tmp_path).scaling)
    assert row["marks"] == ("other updates (1 of 1)" if other else None)


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


def test_terminal_and_page_mark_the_row_and_explain_below(tmp_path):
    """All three runs on 4 GPUs are marked, two on 2, none on 1."""
    for repeat in range(3):
        write_run(tmp_path, repeat=repeat)
        write_run(tmp_path, gpus=2, repeat=repeat, summary={"marks": "load" if repeat else None})
        slow = {"marks": "load; steal", "straggler_rank": 3, "straggler_host": "node2"}
        write_run(tmp_path, gpus=4, repeat=repeat, summary=slow, sections={"ranks_differ": ["torch"]})
    tables = tables_of(tmp_path)
    text, page = summary_text(tables.measurements), html.unescape(render(tables, Drawing(), tmp_path))
    lines = [line.split() for line in text.splitlines()]
    n = lines[0].index("n")
    assert lines[0][n + 1] == "!"
    rows = {line[n - 3]: line[n + 1] for line in lines if line[:1] == ["ddp"] and "ok" in line}
    assert rows == {"1": "10.2", "2": "!1", "4": "!2"}, "the row without a mark goes on with its epoch time"
    assert [page.count(f'<td data-name="!" class="number">!{number}</td>') for number in (1, 2)] == [1, 1]
    for line in LINES:
        assert f"\n{line}\n" in text
        assert f"<li>{line}</li>" in page
    assert "throttled" not in text


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


def warnings_of(results, word=""):
    return [text for text in tables_of(results).warnings if word in text]


def run(results, framework, **ledger):
    shared = {"global_batch": 64, "samples": 3072, "updates": 48, "lr_last": 0.1, "weights_hash_start": "abc"}
    write_run(results, framework=framework, gpus=2, sections={"ledger": shared | ledger})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"global_batch": 128, "updates": 24}, []),
        ({"weights_hash_start": "def"}, ["weights_hash_start (abc: ddp on 2; def: fsdp on 2)"]),
        (
            {"updates": 47, "lr_last": 0.2},
            ["updates (48: ddp on 2; 47: fsdp on 2)", "lr_last (0.1: ddp on 2; 0.2: fsdp on 2)"],
        ),
    ],
    ids=["the same", "another batch", "other initial weights", "fewer updates and another rate"],
)
def test_what_makes_it_another_training_is_named(tmp_path, other, said):
    run(tmp_path, "ddp")
    run(tmp_path, "fsdp", **other)
    failed = {"ledger": {"global_batch": 64, "updates": 3}}
    write_run(tmp_path, framework="zero1", gpus=2, status="oom", sections=failed)
    assert warnings_of(tmp_path) == [
        f"not the same training: resnet50, global batch 64, differs in {text}" for text in said
    ]


def test_values_that_begin_alike_are_shown_to_differ(tmp_path):
    run(tmp_path, "ddp", lr_last=0.30000000000000004)
    run(tmp_path, "fsdp", lr_last=0.3)
    for framework, number in (("gpipe", "6248"), ("single", "6338")):
        environment = {"cpu_model": f"Intel(R) Xeon(R) Gold {number} CPU @ 2.50GHz", "nccl": f"{number}" * 30}
        write_run(tmp_path, framework=framework, gpus=8, sections={"environment": environment})
    rate, around = warnings_of(tmp_path)
    assert "(0.30000000000000004: ddp on 2; 0.3: fsdp on 2)" in rate
    assert '"Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz": gpipe on 8; ' in around
    assert '"Intel(R) Xeon(R) Gold 6338 CPU @ 2.50GHz": single on 8)' in around
    assert around.count("…") == 2


def test_merged_commits_are_named_once(tmp_path):
    for repeat, commit in enumerate(("abc", "def")):
        write_run(tmp_path, repeat=repeat, sections={"environment": {"git_commit": commit}})
    tables = tables_of(tmp_path)
    page = render(tables, Drawing(), tmp_path)
    assert page.count("git_commit (") == 1
    assert "different commits" not in page


@pytest.mark.parametrize(
    ("count", "rate", "ends"),
    [
        (1, 200.0, ()),
        (1, 210.0, ("of 105.0 % is above 100 % (without an interval): is the base", "(single, 10.0 ms a sample)")),
        (6, 204.0, ("which its interval does not show: it begins at 97.1 %",)),  # 204 / (2 x 105)
    ],
    ids=["100 %", "without an interval", "an interval that begins below"],
)
def test_an_efficiency_above_100_percent_is_questioned(tmp_path, count, rate, ends):
    write_repeats(tmp_path, *(100.0 + repeat for repeat in range(count)), framework="single")
    write_repeats(tmp_path, *(rate + 2 * repeat for repeat in range(count)), gpus=2)
    found = warnings_of(tmp_path, "100 %")
    assert len(found) == bool(ends)
    name = "ddp, resnet50, 2 GPUs, weak scaling, 32 samples a GPU: efficiency of "
    assert all(text.startswith(name) for text in found)
    assert all(end in text for text in found for end in ends)


def test_the_question_names_the_settings_of_the_row_and_of_its_base(tmp_path):
    for gpus, rate, precision in ((1, 100.0, "fp32"), (2, 210.0, "fp32"), (2, 250.0, "bf16")):
        write_run(tmp_path, gpus=gpus, rate=rate, train={"precision": precision})
    first, *_ = (text for text in tables_of(tmp_path, across=["precision"]).warnings if "125.0 %" in text)
    assert first.startswith("ddp (bf16), resnet50, 2 GPUs, weak scaling, 32 samples a GPU: efficiency of 125.0 % is ")
    assert "is the base (ddp (fp32), 10.0 ms a sample) slow" in first


def runs(rates):
    """Repeats that started day after day."""
    rows = [{"status": "ok", "start": f"2026-01-{day:02}", "throughput_samples_per_s": rate} for day, rate in rates]
    return [AttemptRow(row, {}) for row in rows]


def test_drift_is_the_last_third_over_the_first():
    slow = runs([(1, 10.0), (3, 8.0), (5, 5.0)])
    fast = runs([(2, 100.0), (4, 80.0), (6, 40.0)])
    assert drift([slow, fast]) == (  # 2 and 2.5
        "drift: the last third of 6 repeated runs took 2.250 times the first third's time "
        "(2 measurements in both, too few runs for an interval)"
    )


def test_drift_is_that_of_the_machine_and_not_half_of_it():
    """Nine measurements of three repeats in turn, on a machine that becomes slower: each takes 1.5 times as long."""
    order = [(number, third, number + 9 * third) for third in range(3) for number in range(9)]
    measured = [[(day, 1 / (1 + third / 4)) for n, third, day in order if n == number] for number in range(9)]
    assert drift([runs(repeats) for repeats in measured]) == (
        "drift: the last third of 27 repeated runs took 1.500 times the first third's time "
        "(1.500 to 1.500, 9 measurements in both: slower)"
    )


def test_drift_cannot_be_seen_in_repeats_that_lie_side_by_side():
    beside = [runs([(3 * number + n, 10.0 - number) for n in range(3)]) for number in range(3)]
    assert drift(beside) == ("drift: no measurement has repeats in the first and in the last third of 9 repeated runs")


def test_drift_is_a_ratio_of_medians_of_the_runs_that_ended_ok():
    """Seconds of eleven repeats in order of start: 1 2 7 | 4 4 4 4 4 | 3 5 9; those that failed took 1000."""
    seconds = (1.0, 2.0, 7.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 5.0, 9.0)
    group = runs([(n, 1 / time) for n, time in enumerate(seconds)])
    failed = [AttemptRow(run.row | {"status": "killed"}, {}) for run in runs([(n, 1e-3) for n in range(20, 26)])]
    result = drift([[*group, *failed]])
    assert result is not None
    assert result.startswith("drift: the last third of 11 repeated runs took 2.500 times the first third's time (1 m")


def test_drift_has_an_interval_from_18_runs_on():
    result = drift([runs([(n, 100.0 - n) for n in range(18)])])
    # seconds relative to each other: first third 1/100 to 1/95, last 1/88 to 1/83
    low, high = (1 / 88) / (1 / 95), (1 / 83) / (1 / 100)
    assert result is not None
    assert f"({low:.3f} to {high:.3f}, 1 measurement in both: slower)" in result
    steady = drift([runs([(n, 100.0 + n % 3) for n in range(18)])])
    assert steady is not None
    assert "no drift shown" in steady


def test_runs_without_repeats_give_no_drift():
    assert drift([runs([(n, 100.0)]) for n in range(9)]) is None
