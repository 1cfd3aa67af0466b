"""Predictions beside measurements: a step of 8 samples takes 0.25 s on one device, the all-reduce of four 0.05 s.

The cluster's link is made so: each rank sends 2 x 3/4 of the gradients' bytes, and nothing hides it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from ddlbench.config.compose import configuration
from ddlbench.errors import UserError
from ddlbench.exchange.__main__ import main as import_published
from ddlbench.oracle import bands
from ddlbench.oracle.measured.inputs import machine_of
from ddlbench.predict.__main__ import main as predict
from ddlbench.predict.grading.grade import grade
from ddlbench.report.__main__ import main
from ddlbench.report.predicted import with_predictions
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.rows import Row
from ddlbench.results.tables.tables import Tables, make_tables, records
from tests.support.figures import figures_of
from tests.support.records import GPU, write_run

Capture = pytest.CaptureFixture[str]
GIB = 2**30
WORDS = ("+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=16", "model.image_size=64",
         "train.batch_per_gpu=8")  # fmt: skip


@cache
def settings(framework: str, *words: str) -> dict[str, Any]:
    return configuration(f"+framework={framework}", *WORDS, *words).resolved


@cache
def gradient_bytes() -> int:
    model = configuration("+framework=single", *WORDS).model
    return 4 * sum(parameter.numel() for parameter in model.build().parameters())


@dataclass
class Made:
    """Runs and the predictions of them."""

    results: Path
    cluster: str

    def write(self, framework: str, gpus: int, step_s: float, **others: Any) -> None:
        """A run of 8 samples a GPU whose step takes so long."""
        others["sections"] = {"config": settings(framework), **others.get("sections", {})}
        write_run(self.results, framework=framework, gpus=gpus, rate=8 * gpus / step_s, per_gpu=8, **others)

    def write_pair(self, step_s: float, **others: Any) -> None:
        """One device at 0.25 s a step, and ddp on four."""
        self.write("single", 1, 0.25)
        self.write("ddp", 4, step_s, **others)

    def write_curve(self) -> None:
        """ddp on one, two and four devices, on a link of half of the speed in the cluster's file: the all-reduce of two
        takes 0.067 s instead of 0.033, that of four 0.1 s instead of 0.05."""
        for gpus, step_s in ((1, 0.25), (2, 0.25 + 0.2 / 3), (4, 0.35)):
            self.write("ddp", gpus, step_s)

    def graded(self, capsys: Capture, *words: str) -> dict[str, Any]:
        assert predict(["--grade", str(self.results), f"cluster={self.cluster}", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    def tables(self) -> Tables:
        result = read_all([self.results])
        return with_predictions(make_tables(result), result, self.cluster)

    def row(self) -> Row:
        return rows_of(self.tables())["ddp", 4]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    link = {"name": "made", "alpha_s": 1e-12, "bytes_per_s": 1.5 * gradient_bytes() / 0.05}
    device = {"name": GPU, "type": "cuda", "memory_bytes": None, "bytes_per_s": None}
    path = tmp_path / "made.yaml"
    content = {"name": "made", "device": device, "devices_per_node": 4, "links": [link], "overlap": False, "spread": 0}
    OmegaConf.save(OmegaConf.create(content), path)
    return Made(tmp_path / "results", str(path))


def rows_of(tables: Tables) -> dict[tuple[str, int], Row]:
    return {(row["framework"], row["gpus"]): row for row in records(tables.scaling)}


def filled(row: Row) -> Row:
    """The cells with a prediction."""
    return {name: value for name, value in row.items() if name.startswith("predicted") and value is not None}


def without_prediction(tables: Tables) -> str:
    """The warning that names the measurements without a prediction."""
    (line,) = [line for line in tables.warnings if line.startswith("no prediction of ")]
    return line


def test_four_devices_from_one_by_hand(made: Made) -> None:
    """Messages are all gradients once, and BatchNorm's statistics never. Memory is weights, gradients and momentum at 4
    bytes, activations and BatchNorm's statistics on top; measured 3.5 GiB."""
    made.write_pair(0.32)
    tables = made.tables()
    row = rows_of(tables)["ddp", 4]
    assert row["predicted_step_s"] == pytest.approx(0.30)
    assert row["predicted_sample_time_s"] == pytest.approx(0.30 / 32)
    assert (row["predicted_compute_s"], row["predicted_bubble_s"]) == (pytest.approx(0.25), 0)
    assert row["predicted_comm_exposed_s"] == pytest.approx(0.05)
    assert row["predicted_error"] == pytest.approx(-0.02 / 0.32)
    assert row["predicted_from"].startswith("single on one device (single-resnet50")
    assert row["predicted_flag"] is None
    assert row["predicted_message_bytes"] == pytest.approx(gradient_bytes(), abs=1)
    assert 3 * gradient_bytes() < row["predicted_memory_bytes"] < 3 * gradient_bytes() + 0.2 * GIB
    assert row["memory_allocated_peak_bytes"] == 3.5 * GIB
    assert row["predicted_memory_error"] == pytest.approx(row["predicted_memory_bytes"] / (3.5 * GIB) - 1)
    assert not any("predict" in line for line in tables.warnings)


def test_the_largest_own_run_is_graded_from_its_base_and_from_all_smaller_ones(made: Made, capsys: Capture) -> None:
    """Two GPU counts are no series, and a base alone is none either."""
    made.write_curve()
    made.write("zero2", 1, 0.25)
    made.write("zero2", 4, 0.5)
    result = made.graded(capsys)
    (alone,), (learned,) = result["points"], result["learned_points"]
    assert (alone["strategy"], alone["gpus"], alone["base"]) == ("ddp", 4, "1 GPU")
    assert alone["measured_s"] == pytest.approx(0.35)
    assert alone["error"] == pytest.approx(0.30 / 0.35 - 1)
    assert learned["base"] == "1 and 2 GPUs"
    assert abs(learned["error"]) < 0.03
    assert alone["low_95_s"] < alone["predicted_s"] < alone["high_95_s"]


def test_runs_on_two_numbers_of_devices_are_not_graded(made: Made, capsys: Capture) -> None:
    for gpus, step_s in ((1, 0.25), (2, 0.30)):
        made.write("ddp", gpus, step_s)
    assert predict(["--grade", str(made.results), f"cluster={made.cluster}"]) == 2
    assert "complete runs with the same settings on three numbers of devices" in capsys.readouterr().err


def test_own_runs_are_graded_with_the_algorithm_of_the_command(made: Made, capsys: Capture) -> None:
    """A tree sends 2 m bytes where a ring of four sends 1.5 m: 0.067 s instead of 0.05."""
    made.write_curve()
    (alone,) = made.graded(capsys, "--algorithm", "tree")["points"]
    assert alone["predicted_s"] == pytest.approx(0.25 + 0.05 * 2 / 1.5)


def test_a_graded_run_is_not_predicted_from_others_on_as_many_gpus(made: Made, capsys: Capture) -> None:
    """A curve has four GPUs of two clusters."""
    made.write_curve()
    made.write("ddp", 4, 0.7, cluster="other", sections={"config": settings("ddp", "cluster.name=other")})
    (learned,) = made.graded(capsys)["learned_points"]
    assert (learned["gpus"], learned["base"]) == (4, "1 and 2 GPUs")


def test_a_run_that_is_spread_over_the_nodes_in_another_way_is_not_graded(made: Made, capsys: Capture) -> None:
    """Four GPUs of two nodes, where a node of the cluster has four."""
    for gpus, step_s in ((1, 0.25), (2, 0.25 + 0.2 / 3)):
        made.write("ddp", gpus, step_s)
    launch = {"world_size": 4, "nodes": 2, "ranks_per_node": 2, "device_type": "cuda"}
    made.write("ddp", 4, 0.7, sections={"launch": launch})
    assert predict(["--grade", str(made.results), f"cluster={made.cluster}", "--json"]) == 2
    assert "ddp, resnet50, 4 GPUs: 2 nodes of cluster made have another number of devices" in capsys.readouterr().err


def test_copies_to_the_host_are_no_messages(made: Made) -> None:
    machine = OmegaConf.load(made.cluster)
    machine.device.host_bytes_per_s = 50e9
    OmegaConf.save(machine, made.cluster)
    for framework, gpus, step_s in (("single", 1, 0.25), ("ddp", 4, 0.32)):
        config = settings(framework, "train.offload_activations=blocks")
        made.write(framework, gpus, step_s, sections={"config": config})
    row = made.row()
    assert row["predicted_message_bytes"] == pytest.approx(gradient_bytes(), abs=1)


def test_runs_on_one_device_have_no_prediction(made: Made) -> None:
    """They are what the others are predicted from."""
    made.write("single", 1, 0.25)
    made.write("ddp", 1, 0.26)
    made.write("ddp", 4, 0.32)
    rows = rows_of(made.tables())
    assert filled(rows["single", 1]) == filled(rows["ddp", 1]) == {}
    assert rows["ddp", 4]["predicted_step_s"] == pytest.approx(0.31), "from the framework's own run, if there is one"


def test_a_run_is_not_predicted_from_itself(made: Made) -> None:
    """The oracle would start from a few devices: from the measurement itself, which it would predict without error."""
    made.write("ddp", 4, 0.32)
    made.write("ddp", 2, 0.30)
    tables = made.tables()
    rows = rows_of(tables)
    assert rows["ddp", 4]["predicted_step_s"] is rows["ddp", 2]["predicted_step_s"] is None
    assert "ddp, resnet50, 2 GPUs, ddp, resnet50, 4 GPUs: " in without_prediction(tables)
    assert "has no complete run of resnet50 on one" in without_prediction(tables)


def test_a_measurement_without_a_run_that_ended_ok_has_no_prediction(made: Made) -> None:
    made.write_pair(0.32)
    made.write("zero2", 4, 0.32, status="oom")
    rows = rows_of(made.tables())
    assert (rows["zero2", 4]["status"], rows["zero2", 4]["predicted_step_s"]) == ("oom", None)
    assert rows["ddp", 4]["predicted_step_s"] == pytest.approx(0.30)


@pytest.mark.parametrize("wait", [{"data_wait_share": 0.5}, {"data_wait_share": 0.9, "data_wait_mean_share": 0.5}])
def test_waiting_for_data_is_on_neither_side(made: Made, wait: dict[str, float]) -> None:
    made.write("single", 1, 0.50, summary=wait)
    made.write("ddp", 4, 0.60, summary=wait)
    row = made.row()
    assert row["predicted_step_s"] == pytest.approx(0.30)
    assert row["predicted_error"] == pytest.approx(0, abs=1e-9)


def window(step_s: float, **shares: float) -> dict[str, Any]:
    item = {f"{name}_share": shares.get(name, 0.0) for name in ("compute", "comm_exposed", "idle", "data")}
    return {"profile": {"status": "ok", "steps": 10, "window_s": 4 * 10 * step_s, "step_s": step_s, **item}}


@pytest.mark.parametrize(
    ("step_s", "shares", "part"),
    [
        (0.60, {"compute": 0.5, "comm_exposed": 0.5}, "exposed communication took 300 ms, 50.0 ms predicted"),
        (0.60, {"compute": 0.9, "comm_exposed": 0.1}, "computation took 540 ms, 250 ms predicted"),
        (0.60, {"compute": 0.45, "comm_exposed": 0.1, "idle": 0.45}, "idle time took 270 ms, 0.00 µs predicted"),
        (0.15, {"compute": 0.7, "comm_exposed": 0.3}, "computation took 105 ms, 250 ms predicted"),  # it is too fast
        (0.60, {}, ""),
    ],
)
def test_a_run_outside_its_band_names_the_part_that_deviates(
    made: Made, step_s: float, shares: dict[str, float], part: str
) -> None:
    made.write_pair(step_s, sections=window(step_s, **shares) if shares else {})
    tables = made.tables()
    row = rows_of(tables)["ddp", 4]
    assert row["predicted_error"] == pytest.approx(0.30 / step_s - 1)
    where = f"; in the profiled window {part}" if part else " (no profiled window says which part of it)"
    low, high = (f"{end:.0f} ms" for end in list(bands.band(300, "ddp", 1).values())[2:])
    seconds = f"a step took {1000 * step_s:.0f} ms, 300 ms predicted (95 %: {low} to {high})"
    assert row["predicted_flag"] == f"outside the band of its prediction: {seconds}{where}"
    assert f"ddp, resnet50, 4 GPUs: {row['predicted_flag']}" in tables.warnings


DDP = settings("ddp")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"environment": {"gpu_model": GPU, "torch": "2.11.0"}}, "has no complete run of resnet50 on one"),
        ({"environment": {"gpu_model": "Another GPU"}}, f"its device is Another GPU, that of cluster made is {GPU}"),
        (
            {"launch": {"world_size": 4, "nodes": 2, "device_type": "cuda", "hosts": ["a", "b"]}},
            "2 nodes of cluster made have another number of devices",
        ),
        ({"config": DDP | {"framework": {"name": "nobodys"}}}, "framework=nobodys is no option"),
        ({"config": DDP | {"train": {**DDP["train"], "later": 1}}}, "train.later does not exist"),
    ],
)
def test_missing_inputs_leave_the_cells_empty(made: Made, sections: dict[str, Any], reason: str) -> None:
    made.write_pair(0.32, sections=sections)
    tables = made.tables()
    rows = rows_of(tables)
    (row,) = [row for (_, gpus), row in rows.items() if gpus == 4]
    assert filled(row) == {}
    assert reason in without_prediction(tables)


def test_an_unknown_cluster_is_refused(made: Made) -> None:
    made.write("single", 1, 0.25)
    with pytest.raises(UserError, match="cluster=nowhere is not known"):
        replace(made, cluster="nowhere").tables()


def test_the_report_shows_both(made: Made, capsys: Capture) -> None:
    made.write_pair(0.60)
    assert main([str(made.results), "--predict", made.cluster]) == 0
    told = capsys.readouterr()
    (line,) = [line.split() for line in told.out.splitlines() if line.endswith("-50.0 %!")]
    row = made.row()
    memory = [f"{row['predicted_memory_bytes'] / GIB:.2f}", "GiB", f"{100 * row['predicted_memory_error']:+.1f}", "%"]
    assert line == ["ddp", "resnet50", "native", "4", "weak", *memory, "0.300", "s", "-50.0", "%!"]
    assert (made.results / "report" / "figures" / "predicted.svg").exists()
    assert "outside the band of its prediction" in told.err
    page = (made.results / "report" / "report.html").read_text()
    assert "prediction error" in page
    assert "-50.0 %!" in page
    assert "outside the band of its prediction" in page


def test_the_figure_has_the_band_of_each_prediction(made: Made) -> None:
    made.write_pair(0.60)
    tables = made.tables()
    rows = rows_of(tables)
    (axes,) = figures_of(tables, "predicted")["predicted"].axes
    low, high = (rows["ddp", 4][f"predicted_{end}_s"] for end in ("low", "high"))
    assert low < 0.30 < high
    drawn = [np.array(line.get_xydata()).tolist() for line in axes.lines]
    assert [[4, pytest.approx(low)], [4, pytest.approx(high)]] in drawn


def test_published_measurements_are_predicted_from_the_bases_of_their_sources(tmp_path: Path) -> None:
    """Records say all that --grade reads of the rows that they were made of: both predict the same."""
    table = tmp_path / "points.csv"
    header, *lines = Path("benchmarks/measured/points.csv").read_text().splitlines()
    chosen = [line for line in lines if line.startswith(("server-gear blog,VGG", "TensorFlow benchmarks 2017,ResNet"))]
    table.write_text("\n".join((header, *chosen)))
    assert import_published(["import", str(table), "--into", str(tmp_path / "results")]) == 0
    tables = Made(tmp_path / "results", "published").tables()
    rows = rows_of(tables)
    assert all(row["predicted_step_s"] is None for (_, gpus), row in rows.items() if gpus == 1)
    graded = [
        (point["measured_s"], point["predicted_s"], point["error"]) for point in grade(table, machine_of("abci")).points
    ]
    found = [row for row in records(tables.scaling) if row["predicted_error"] is not None]
    of_report = [
        (row["sample_time_s"] * row["global_batch"], row["predicted_step_s"], row["predicted_error"]) for row in found
    ]
    assert len(graded) == 9
    # Records do not keep step_ms, which the source rounds to a microsecond.
    np.testing.assert_allclose(sorted(of_report), sorted(graded), rtol=1e-5, atol=1e-5)
    (slow,) = [row for row in found if row["gpus"] == 8 and row["global_batch"] == 512]
    assert slow["predicted_from"] == "1 GPU of the same source: 64 samples in 152 ms"
    assert without_prediction(tables).endswith("and 1 more: a parameter server has no equations for GPUs")
