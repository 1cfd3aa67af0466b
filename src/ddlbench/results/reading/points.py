"""A CSV file of published measurements, one a row, with the base that each one is compared with in its source.

A row that contradicts itself or cannot be understood is left out and named, never repaired.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.foreign import read_bytes
from ddlbench.results.reading.attempts import why
from ddlbench.results.reading.published import Facts, gpu_family
from ddlbench.results.rows import group_by
from ddlbench.texts import first_few, printable, shortened

COLUMNS = (
    "source", "model", "framework", "strategy", "gpus", "gpus_per_node", "gpu_type", "network", "batch_per_gpu",
    "global_batch", "precision", "measured", "unit", "one_gpu_value", "base_gpus", "base_value", "step_ms", "layout",
    "seq_len", "loader", "in_scope", "tier", "quote", "url",
)  # fmt: skip
UNITS = ("img/s", "seq/s", "tokens/s/GPU", "s/epoch")
TOLERANCE = 0.01  # of two cells that say the same: sources round
LONGEST_CELL = 300  # letters
_EPOCH = re.compile(r"\b([0-9]+) images an epoch\b")
_MICRO = re.compile(r"\bmbs([0-9]+)\b")


@dataclass(frozen=True)
class Base:
    """What the efficiency of a row starts from: GPUs, and the measured value in the row's unit."""

    gpus: int
    value: float
    sample_time_s: float


@dataclass(frozen=True)
class Point:
    """A row of the file. line: its number; cells: its texts, as they can be printed; base: None where none is stated"""

    line: int
    cells: Mapping[str, str]
    gpus: int
    nodes: int
    value: float
    sample_time_s: float
    global_batch: int | None
    tokens: int | None
    base: Base | None

    @property
    def series(self) -> str:
        """Equal for rows of a source that start from one base, the base itself included."""
        base = self.base or Base(self.gpus, self.value, self.sample_time_s)
        return f"{base.gpus} GPU{'s' if base.gpus > 1 else ''} at {base.value:g} {self.cells['unit'].partition(' ')[0]}"

    def facts(self) -> Facts:
        """The point as a measurement. Its base may be no row of the file, so that it is stated with it."""
        cells, base = self.cells, self.base
        stated = {"base_gpus": base.gpus, "base_sample_time_s": base.sample_time_s} if base else {}
        kept = ("measured", "unit", "base_value", "network", "layout", "tier", "in_scope")
        micro = _MICRO.search(cells["layout"])
        return Facts(
            source=cells["source"],
            url=cells["url"],
            model=cells["model"],
            strategy=cells["strategy"],
            library=cells["framework"],
            gpu=cells["gpu_type"],
            gpus=self.gpus,
            nodes=self.nodes,
            sample_time_s=self.sample_time_s,
            global_batch=self.global_batch,
            series=self.series,
            micro_batch=int(micro[1]) if micro else None,
            tokens=self.tokens,
            precision=cells["precision"] or None,
            loader=cells["loader"] or None,
            more={**{name: cells[name] or None for name in kept}, **stated},
        )


def read_points(path: Path) -> tuple[list[Point], list[str]]:
    """The rows of a file that can be used, and a line for each of the others. UserError where the file cannot be read
    or has other columns."""
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
        rows = list(csv.DictReader(lines, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error) if isinstance(error, csv.Error) else why(error)
        raise UserError(f"{path} cannot be read ({reason}): give a CSV file in UTF-8") from error
    header = set(rows[0]) - {None} if rows else set[str]()
    if wrong := sorted(header ^ set(COLUMNS)):
        odd = ", ".join(first_few([shortened(str(name), 40) for name in wrong], 5))
        raise UserError(f"{path} has other columns (missing or unknown: {odd}): give {', '.join(COLUMNS)}")
    points, left_out = list[Point](), list[str]()
    for line, row in enumerate(rows, 2):
        try:
            points.append(_point(line, row))
        except ValueError as error:
            left_out.append(f"row {line}: {error}")
    points, mixed = _without_mixed_units(points)
    return points, [*left_out, *mixed]


def _point(line: int, row: Mapping[str | None, object]) -> Point:
    """ValueError with the reason where the row cannot be used."""
    if None in row or None in row.values():
        raise ValueError(f"it has {'more' if None in row else 'fewer'} cells than the header")
    cells = {str(name): shortened(printable(str(text).strip()), LONGEST_CELL) for name, text in row.items()}
    if missing := [name for name in ("source", "model", "strategy", "url") if not cells[name]]:
        raise ValueError(f"{', '.join(missing)} is empty")
    if gpu_family(cells["gpu_type"]) is None:
        raise ValueError(f"unknown GPU {cells['gpu_type']!r}")
    gpus, per_node, value = _count(cells, "gpus"), _count(cells, "gpus_per_node"), _number(cells, "measured")
    nodes, left = divmod(gpus, min(per_node, gpus))
    if left:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {per_node}")
    seconds = _sample_time(cells, value, gpus)
    base = None
    if cells["base_gpus"] or cells["base_value"]:
        of_base = _count(cells, "base_gpus"), _number(cells, "base_value")
        base = Base(*of_base, _sample_time(cells, of_base[1], of_base[0]))
    tokens = _count(cells, "seq_len") if cells["seq_len"] else None
    return Point(line, cells, gpus, nodes, value, seconds, _batch(cells, gpus, seconds), tokens, base)


def _batch(cells: Mapping[str, str], gpus: int, seconds: float) -> int | None:
    """Samples of an update, which the cells may state in up to three ways."""
    if not cells["global_batch"]:
        return None
    batch = _count(cells, "global_batch")
    if cells["batch_per_gpu"] and _number(cells, "batch_per_gpu") * gpus != batch:
        raise ValueError(f"{gpus} GPUs with {cells['batch_per_gpu']} samples each are not global_batch = {batch}")
    if cells["step_ms"] and abs(_number(cells, "step_ms") / (1e3 * seconds * batch) - 1) > TOLERANCE:
        unit = f"{cells['measured']} {cells['unit']}"
        raise ValueError(
            f"mixed units: {unit} give {1e3 * seconds * batch:.6g} ms a step, step_ms is {cells['step_ms']}"
        )
    return batch


def _sample_time(cells: Mapping[str, str], value: float, gpus: int) -> float:
    """Seconds a sample on so many GPUs, from a value in the row's unit."""
    unit = cells["unit"].partition(" ")[0]
    if unit in ("img/s", "seq/s"):
        return 1 / value
    if unit == "tokens/s/GPU":
        return _count(cells, "seq_len") / (value * gpus)
    if unit == "s/epoch":
        if not (images := _EPOCH.search(cells["layout"])):
            raise ValueError("its layout does not state the images of an epoch")
        return value / int(images[1])
    raise ValueError(f"unknown unit {cells['unit']!r}: known are {', '.join(UNITS)}")


def _count(cells: Mapping[str, str], name: str) -> int:
    number = _number(cells, name)
    if number != int(number):
        raise ValueError(f"{name} = {cells[name]!r} is no whole number")
    return int(number)


def _number(cells: Mapping[str, str], name: str) -> float:
    """Finite and above 0."""
    try:
        number = float(cells[name])
    except ValueError:
        number = 0.0
    if not 0 < number < 1e15:  # false for nan
        raise ValueError(f"{name} = {cells[name]!r} is no number above 0")
    return number


def _without_mixed_units(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Without the rows of a source and model that are in several units."""
    kept, lines = list[Point](), list[str]()
    for (source, model), group in group_by(points, lambda point: (point.cells["source"], point.cells["model"])).items():
        if len(units := sorted({point.cells["unit"] for point in group})) == 1:
            kept += group
        else:
            lines.append(f"{_rows(group)}: {source}, {model}: mixed units ({', '.join(units)})")
    return sorted(kept, key=lambda point: point.line), lines


def _rows(points: Sequence[Point]) -> str:
    return f"row {', '.join(first_few([str(point.line) for point in points], 20))}"


def without_base(points: Sequence[Point]) -> list[str]:
    """A line with the rows without a base, whose efficiency stays empty."""
    alone = [point for point in points if point.base is None]
    return [f"{_rows(alone)}: without a base: efficiency stays empty"] if alone else []
