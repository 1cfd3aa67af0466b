"""The last record of results as OpenMetrics text, for the textfile collector of Prometheus' node_exporter.

https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import Unavailable, UserError, reporting
from ddlbench.files import replacing
from ddlbench.record.schema import RUNS
from ddlbench.results.rows import OWN, Row, latest

LABELS = ("run_id", "attempt", "status", "framework", "model", "gpus", "precision", "device_model")


def write(file: Path, rows: Sequence[Row]) -> None:
    """The last own attempt among rows of runs.csv. UserError if there is none or the file cannot be written;
    Unavailable without prometheus-client."""
    content = text(last(rows))
    with reporting(f"{file} cannot be written", "choose another --openmetrics FILE"), replacing(file) as stream:
        stream.write(content)  # at once: the collector may read at any time


def last(rows: Sequence[Row]) -> Row:
    """The own attempt that started last."""
    started = [row for row in rows if row["origin"] == OWN and row["start"]]
    if not started:
        raise UserError(f"--openmetrics: none of {len(rows)} records is an own run that says when it started")
    return latest(started)


def text(row: Row) -> bytes:
    """A gauge for each number that a row of runs.csv has, and the names of the run as `ddlbench_run_info`. That is a
    gauge, too: node_exporter refuses a file with the type info."""
    try:
        from prometheus_client import CollectorRegistry, Gauge
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError as error:
        raise Unavailable(f"--openmetrics needs prometheus-client ({error}): pip install 'ddlbench[tools]'") from error
    registry = CollectorRegistry()
    names = ["" if row[name] is None else str(row[name]) for name in LABELS]
    Gauge("ddlbench_run_info", "The last run.", LABELS, registry=registry).labels(*names).set(1)
    for column in RUNS:
        if column.kind in ("int", "float") and row.get(column.name) is not None:
            # A metric has a unit only if its name ends with it, as OpenMetrics demands.
            unit = column.unit if column.name.endswith(f"_{column.unit}") else ""
            Gauge(f"ddlbench_{column.name}", column.meaning, unit=unit, registry=registry).set(row[column.name])
    return generate_latest(registry)
