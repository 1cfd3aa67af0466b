"""A CSV file of published measurements, one a row, with the base that each one is compared with in its source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddlbench.errors import UserError
from ddlbench.foreign import Object
from ddlbench.results.reading.csv_rows import UNITS, CsvRow, read_csv
from ddlbench.results.reading.published import Facts, gpu_family
from ddlbench.results.rows import group_by, section
from ddlbench.texts import first_few, printable, shortened

COLUMNS = (
    "source", "model", "framework", "strategy", "gpus", "gpus_per_node", "gpu_type", "network", "batch_per_gpu",
    "global_batch", "precision", "measured", "unit", "one_gpu_value", "base_gpus", "base_value", "step_ms", "layout",
    "seq_len", "loader", "in_scope", "tier", "quote", "url",
)  # fmt: skip
OPTIONAL = ("one_gpu_value", "loader", "in_scope", "tier", "quote")
KEPT = ("measured", "unit", "base_value", "network", "layout", "tier", "in_scope")  # as they stand in the row


class Point(NamedTuple):
    """A row of the file, and what it states."""

    row: CsvRow
    facts: Facts


def csv_row(record: Object, line: int) -> CsvRow:
    """The row that a record was made of, without what the record does not keep (quote, step_ms)."""
    config, launch, published = (section(record, name) for name in ("config", "launch", "published"))
    cells = {
        **{name: published.get(name) for name in ("source", *KEPT, "base_gpus")},
        "model": section(config, "model").get("name"),
        "framework": record.get("framework_library"),
        "strategy": section(config, "framework").get("name"),
        "gpus": launch.get("world_size"),
        "gpus_per_node": launch.get("ranks_per_node"),
        "gpu_type": section(record, "environment").get("gpu_model"),
        "global_batch": section(record, "ledger").get("global_batch"),
        "precision": section(config, "train").get("precision"),
        "seq_len": section(config, "model").get("tokens_per_sample"),
    }
    return CsvRow(line, {name: str(cell) for name, cell in cells.items() if cell is not None})


def read_points(path: Path) -> tuple[list[Point], list[str]]:
    """The rows of a file that can be used, and a line for each of the others. UserError where the file cannot be read
    or has other columns."""
    columns, rows, left_out = read_csv(path)
    if wrong := sorted((columns ^ set(COLUMNS)) - set(OPTIONAL)):
        odd = ", ".join(first_few([shortened(printable(name), 40) for name in wrong], 5))
        raise UserError(f"{path} has other columns (missing or unknown: {odd}): give {', '.join(COLUMNS)}")
    points = list[Point]()
    for row in rows:
        try:
            points.append(_point(row))
        except UserError as error:
            left_out.append(f"row {row.line}: {error}")
    points, mixed = _without_mixed_units(points)
    return points, [*left_out, *mixed]


def _point(row: CsvRow) -> Point:
    if missing := [name for name in ("source", "model", "strategy", "url") if not row[name]]:
        raise UserError(f"{', '.join(missing)} is empty")
    if gpu_family(row["gpu_type"]) is None:
        raise UserError(f"unknown GPU {row['gpu_type']!r}")
    gpus, per_node, value = row.count("gpus"), row.count("gpus_per_node"), row.number("measured")
    nodes, left = divmod(gpus, min(per_node, gpus))
    if left:
        raise UserError(f"{gpus} GPUs do not fill nodes of {per_node}")
    batch = row.batch(gpus)
    seconds = _sample_time_s(row, value, gpus, batch)
    if batch:
        row.step_s(gpus, batch)
    base_gpus, base_value, stated = gpus, value, dict[str, float]()  # without a base the row starts a series
    if row["base_gpus"] or row["base_value"]:
        base_gpus, base_value = row.count("base_gpus"), row.number("base_value")
        base_s = _sample_time_s(row, base_value, base_gpus, None)
        stated = {"base_gpus": base_gpus, "base_sample_time_s": base_s}  # the base may be no row of the file
    facts = Facts(
        source=row["source"],
        url=row["url"],
        model=row["model"],
        strategy=row["strategy"],
        library=row["framework"],
        gpu=row["gpu_type"],
        gpus=gpus,
        nodes=nodes,
        sample_time_s=seconds,
        global_batch=batch,
        # Equal for rows of a source that start from one base, the base itself included.
        series=f"{base_gpus} GPU{'s' if base_gpus > 1 else ''} at {base_value:g} {row['unit'].partition(' ')[0]}",
        micro_batch=row.micro_batch,
        tokens=row.count("seq_len") if row["seq_len"] else None,
        precision=row["precision"] or None,
        loader=row["loader"] or None,
        more={**{name: row[name] or None for name in KEPT}, **stated},
    )
    return Point(row, facts)


def _sample_time_s(row: CsvRow, value: float, gpus: int, batch: int | None) -> float:
    seconds = row.sample_time_s(value, gpus, batch)
    if seconds is None:
        raise UserError(f"unknown unit {row['unit']!r}, or its batch is not stated: known are {', '.join(UNITS)}")
    return seconds


def _without_mixed_units(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Without the rows of a source and model that are in several units."""
    kept, lines = list[Point](), list[str]()
    for (source, model), group in group_by(points, lambda point: (point.row["source"], point.row["model"])).items():
        if len(units := sorted({point.row["unit"] for point in group})) == 1:
            kept += group
        else:
            lines.append(f"{_rows(group)}: {source}, {model}: mixed units ({', '.join(units)})")
    return sorted(kept, key=lambda point: point.row.line), lines


def _rows(points: Sequence[Point]) -> str:
    return f"row {', '.join(first_few([str(point.row.line) for point in points], 20))}"


def without_base(points: Sequence[Point]) -> list[str]:
    """A line with the rows without a base, whose efficiency stays empty."""
    alone = [point for point in points if "base_gpus" not in point.facts.more]
    return [f"{_rows(alone)}: without a base: efficiency stays empty"] if alone else []
