"""However many runs there are, a report has a bounded number of figures, panels, curves and bytes, and names what it
leaves out; its tables have every run. Times are for `python -m benchmarks.reporting`."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks import reporting
from ddlbench.figures.figures import MOST_FILES, PANELS_OF_A_FILE, make_figures
from ddlbench.figures.panels import MOST_CURVES
from ddlbench.report.__main__ import main
from ddlbench.report.documents import ROWS_SHOWN
from tests.support.records import tables_of

EPOCHS = 2
GPUS = (4, 8)
DRAWN = 120  # one repeat of 11 frameworks, 5 models, these GPU counts: four times as many panels as are drawn
RUNS = 1_250  # one repeat of every cell, with 2 loaders and 2 precisions
KINDS = ("throughput", "speedup", "efficiency", "epoch_time", "memory", "accuracy_by_epoch", "perplexity_by_time")


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "GPUS", GPUS)
        reporting.write_campaign(folder, DRAWN, EPOCHS, repeats=1)
    return make_figures(tables_of(folder))


def test_figures_panels_and_curves_are_bounded(drawing):
    assert set(KINDS) <= set(drawing.figures)
    assert len(drawing.figures) <= MOST_FILES
    for name, figure in drawing.figures.items():
        assert len(figure.axes) <= PANELS_OF_A_FILE
        for axes in figure.axes:
            names = set(axes.get_legend_handles_labels()[1]) - {"ideal", "theory"}
            assert 0 < len(names) <= MOST_CURVES, name


def test_what_is_not_drawn_is_named(drawing):
    for name in KINDS:
        (note,) = [note for note in drawing.notes if note.startswith(f"{name}: ")]
        assert "6 of " in note
        assert "--only model=NAME or framework=A,B draws others" in note


@pytest.mark.slow
def test_page_is_small_and_tables_are_whole(tmp_path, capsys):
    reporting.write_campaign(tmp_path / "results", RUNS, EPOCHS, repeats=1)
    assert main([str(tmp_path / "results")]) == 0
    capsys.readouterr()
    report = tmp_path / "results" / "report"
    page = (report / "report.html").read_text()
    assert len(page.encode()) < 15_000_000
    assert f"the first {ROWS_SHOWN} of " in page
    assert "panels are drawn" in page
    assert len(pd.read_csv(report / "tables" / "runs.csv")) == RUNS
    ok = RUNS - -(-RUNS // 50)  # one in 50 fails
    assert len(pd.read_csv(report / "tables" / "epochs.csv")) == ok * EPOCHS
    assert len(list((report / "figures").iterdir())) <= 2 * MOST_FILES
