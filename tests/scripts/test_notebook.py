"""The notebook runs from top to bottom on the tables of a report."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support import records
from tests.support.waiting import WITHIN_S

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient", reason="pip install 'ddlbench[notebook]'")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def executed(name, tables, monkeypatch):
    """The notebook's outputs after it ran on the tables."""
    monkeypatch.setenv("DDLBENCH_TABLES", str(tables))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jupyter_client's and zmq's own
        client = nbclient.NotebookClient(notebook, timeout=WITHIN_S, resources={"metadata": {"path": str(NOTEBOOKS)}})
        client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "stream"]  # no warnings on the way
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    return images, "".join(output["data"].get("text/plain", "") for output in outputs if "data" in output)


def test_the_scaling_notebook_draws_speedup_and_efficiency(tmp_path, monkeypatch):
    records.weak_scaling(tmp_path / "results")
    records.strong_scaling(tmp_path / "results")
    make_tables(read_all([tmp_path / "results"])).write(tmp_path / "tables")
    images, texts = executed("scaling.ipynb", tmp_path / "tables", monkeypatch)
    assert len(images) == 2
    assert "CUDA out of memory" in texts  # the failed attempt is named


def test_the_notebook_of_statistical_efficiency_shows_the_cost_of_a_target(tmp_path, monkeypatch):
    records.weak_scaling(tmp_path / "results")  # top-1 of 0.3, 0.55 and 0.63; epochs of 1024 / rate + 2 s
    for seed, setting in ((1, {"tf32": True}), (2, {"precision": "bf16"})):  # three times as slow
        records.write_run(tmp_path / "results", framework="single", rate=33.0, train={"seed": seed, **setting})
    make_tables(read_all([tmp_path / "results"])).write(tmp_path / "tables")
    monkeypatch.setenv("DDLBENCH_TARGET", "val_top1=0.5")
    images, texts = executed("statistical_efficiency.ipynb", tmp_path / "tables", monkeypatch)
    assert len(images) == 2
    assert f"{2 * (1024 / 100 + 2):.2f}" in texts, "single: two epochs and validations"
    assert texts.count(f"{2 * (1024 / 33 + 2):.2f}") == 2, "no repeats of the others"
    assert " fp32, train.tf32=true " in texts
    assert " bf16 " in texts
