"""--only: some rows of the tables, with the bases of all rows."""

from __future__ import annotations

import pandas as pd
import pytest

from ddlbench.errors import UserError
from ddlbench.report.__main__ import main
from ddlbench.results.tables.tables import only
from tests.support.figures import figures_of
from tests.support.records import strong_scaling, tables_of, weak_scaling, write_run


@pytest.fixture
def tables(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    return tables_of(tmp_path)


def test_the_rows_of_all_tables_and_their_bases(tables):
    part = only(tables, ["framework=ddp", "model=resnet50", "gpus=2,4"])
    assert list(part.runs["gpus"]) == [2, 4]
    assert list(part.scaling["gpus"]) == [2, 4]
    assert set(part.epochs["path"]) == set(part.runs["path"])
    assert set(part.scaling["best_single_framework"]) == {"single"}, "though it is not reported itself"
    assert part.warnings == ["only framework=ddp model=resnet50 gpus=2,4: 2 of 8 attempts are reported"]


def test_no_filter_changes_nothing(tables):
    assert only(tables, []) is tables


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["framework"], "COLUMN=VALUE"),
        (["color=red"], "COLUMN=VALUE"),
        (["framework=dpp"], "no attempt has it; the results have ddp, single"),
        (["framework=single", "gpus=4"], "leave one filter out"),
    ],
)
def test_filters_that_cannot_be_applied(tables, filters, message):
    with pytest.raises(UserError, match=message):
        only(tables, filters)


def test_the_command(tmp_path, capsys):
    for framework in ("ddp", "fsdp"):
        write_run(tmp_path, framework=framework, status="error", reason="boom")
    assert main([str(tmp_path), "--only", "framework=fsdp"]) == 0
    assert list(pd.read_csv(tmp_path / "report" / "tables" / "runs.csv")["framework"]) == ["fsdp"]
    assert "warning: only framework=fsdp: 1 of 2 attempts are reported" in capsys.readouterr().err
    assert main([str(tmp_path), "--only", "framework=x"]) == 2


def test_a_filter_that_takes_a_part_of_the_repeats_says_so(tmp_path):
    for repeat in range(3):
        write_run(tmp_path, repeat=repeat)
        write_run(tmp_path, repeat=repeat, train={"seed": 1})
    tables = tables_of(tmp_path)
    merged = "is not reported: the rows and figures of these are of all their attempts"
    part = only(tables, ["repeat=0,1"])
    assert part.warnings[1] == f"a part of the attempts of 2 measurements and 1 learning curves {merged}"
    assert only(tables, ["seed=1"]).warnings[1] == f"a part of the attempts of 1 learning curves {merged}"
    assert len(only(tables, ["gpus=1"]).warnings) == 1


def test_rows_and_figures_of_a_part_of_the_repeats_are_of_all(tmp_path):
    for gpus in (1, 2):
        for repeat, status in enumerate(("ok", "ok", "ok", "oom")):
            write_run(tmp_path / "results", gpus=gpus, repeat=repeat, status=status)
    part = only(tables_of(tmp_path / "results"), ["status=oom"])
    assert [len(row.runs) for row in part.measurements] == [3, 3]
    (axes,) = figures_of(part, "accuracy_by_batch")["accuracy_by_batch"].axes
    assert [len(line.get_xydata().tolist()) for line in axes.lines] == [2, 6], "two medians, six repeats"
    filters = ["--only", "gpus=2", "repeat=0", "--target", "val_top1=0.5"]
    assert main([str(tmp_path / "results"), "--out", str(tmp_path), *filters]) == 0
    assert pd.read_csv(tmp_path / "tables" / "targets.csv")[["gpus", "runs"]].to_numpy().tolist() == [[2, 3]]
