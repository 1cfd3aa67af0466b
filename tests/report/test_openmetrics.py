"""The last record as OpenMetrics text: Prometheus' own parser reads it, and its numbers are those of the record."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddlbench.errors import Unavailable, UserError
from ddlbench.record.schema import RUNS
from ddlbench.report.documents import metrics, write_metrics

pytest.importorskip("prometheus_client", reason="pip install 'ddlbench[tools]'")
NUMBERS = [column.name for column in RUNS if column.kind in ("int", "float")]
ROW = {
    **{column.name: None for column in RUNS},
    "run_id": 'ddp "a\\b\n"', "status": "ok", "gpus": 4, "start": "2026-01-02T00:00:00Z", "origin": "own",
    "epoch_time_s": 2.5, "throughput_samples_per_s": 128.0,
}  # fmt: skip


def test_prometheus_reads_every_number_with_its_unit() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    families = list(text_string_to_metric_families(metrics(ROW | dict.fromkeys(NUMBERS, 3)).decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names) == 1 + len(NUMBERS)
    assert families[0].samples[0].labels["run_id"] == ROW["run_id"]
    assert {sample.value for family in families[1:] for sample in family.samples} == {3.0}
    units = {family.name: family.unit for family in families}
    assert units["ddlbench_epoch_time_s"] == "s"


def test_an_unknown_number_has_no_line() -> None:
    lines = metrics(ROW).decode().splitlines()
    assert "ddlbench_epoch_time_s 2.5" in lines
    assert "ddlbench_throughput_samples_per_s 128.0" in lines
    assert not any("step_time" in line for line in lines)
    assert {line.split()[-1] for line in lines if line.startswith("# TYPE")} == {"gauge"}  # node_exporter knows no info
    assert lines[-1] == "# EOF"


def test_the_own_attempt_that_started_last_is_written(tmp_path: Path) -> None:
    newer = ROW | {"start": "2026-01-03T00:00:00Z", "epoch_time_s": 7.0}
    published = newer | {"start": "2026-01-04T00:00:00Z", "origin": "published"}
    write_metrics(tmp_path / "run.prom", [newer, ROW, ROW | {"start": None}, published])
    assert "ddlbench_epoch_time_s 7.0\n" in (tmp_path / "run.prom").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="none of 1 records"):
        write_metrics(tmp_path / "run.prom", [ROW | {"start": None}])
    with pytest.raises(UserError, match=r"no/run\.prom cannot be written \(No such file or directory\)"):
        write_metrics(tmp_path / "no" / "run.prom", [ROW])
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Unavailable, match=r"pip install 'ddlbench\[tools\]'"):
        write_metrics(tmp_path / "run.prom", [ROW])
