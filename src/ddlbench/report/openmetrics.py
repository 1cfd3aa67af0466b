"""The last record of results as OpenMetrics text, for the textfile collector of Prometheus' node_exporter.

https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import Unavailable, UserError
from ddlbench.files import replacing
from ddlbench.record.schema import RUNS
from ddlbench.results.reading.published import OWN
from ddlbench.results.rows import Row

# Units have the names that Prometheus gives them, at the end of a metric's name; other units have no name there.
UNITS = {"s": "seconds", "bytes": "bytes", "J": "joules", "W": "watts", "1": "ratio"}
LABELS = ("run_id", "attempt", "status", "framework", "model", "gpus", "precision", "device_model")


def write(file: Path, rows: Sequence[Row]) -> None:
    """The last own attempt among rows of runs.csv. UserError if there is none or the file cannot be written;
    Unavailable without prometheus-client."""
    content = text(last(rows))
    try:
        with replacing(file) as stream:  # the collector may read at any time
            stream.write(content)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another --openmetrics FILE") from error


def last(rows: Sequence[Row]) -> Row:
    """The own attempt that started last: starts are ISO 8601 in UTC."""
    started = [row for row in rows if row["origin"] == OWN and row["start"]]
    if not started:
        raise UserError(f"--openmetrics: none of {len(rows)} records is an own run that says when it started")
    return max(started, key=lambda row: row["start"])


def text(row: Row) -> bytes:
    """A gauge for each known number of a row of runs.csv, and the names of the run as `ddlbench_run_info`."""
    try:
        from prometheus_client import CollectorRegistry, Gauge, Info
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError as error:
        raise Unavailable(f"--openmetrics needs prometheus-client ({error}): pip install 'ddlbench[tools]'") from error
    registry = CollectorRegistry()
    names = {name: str(row[name]) for name in LABELS if row[name] is not None}
    Info("ddlbench_run", "The last run.", registry=registry).info(names)
    for column in RUNS:
        if column.kind in ("int", "float") and row.get(column.name) is not None:
            name, unit = f"ddlbench_{column.name}", UNITS.get(column.unit, "")
            if unit:
                name = name.removesuffix(f"_{column.unit}")
            Gauge(name, column.meaning, unit=unit, registry=registry).set(row[column.name])
    return generate_latest(registry)
