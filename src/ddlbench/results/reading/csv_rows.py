"""Rows of a CSV file with measurements of others: numbers, units, batches, and the seconds that they give.

A row that contradicts itself or cannot be understood is left out and named, never repaired.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.foreign import read_bytes
from ddlbench.results.reading.attempts import reason_of
from ddlbench.texts import printable, shortened

UNITS = ("img/s", "seq/s", "tokens/s", "each also /GPU", "s/epoch", "s/step", "ms")
TOLERANCE = 0.01  # of two cells that say the same: sources round
LONGEST_CELL = 300  # letters
_RATE = re.compile(r"(img|images|seq|sequences|samples|tokens)/s(?:ec|econd)?((?:/| per )gpu)?\b", re.IGNORECASE)
_EPOCH = re.compile(r"\b([0-9]+) images an epoch\b")
_MICRO = re.compile(r"\bmbs([0-9]+)\b")


@dataclass(frozen=True)
class CsvRow:
    """A row of the file. line: its number; cells: its texts by column, as they can be printed

    All methods raise UserError with the reason where the row cannot be used.
    """

    line: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """Empty where the row does not state it."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float:
        """Finite and above 0."""
        try:
            number = float(self[column])
        except ValueError:
            number = 0.0
        if not 0 < number < 1e15:  # false for nan
            raise UserError(f"{column} = {shortened(self[column], 40)!r} is no number above 0")
        return number

    def count(self, column: str) -> int:
        number = self.number(column)
        if number != int(number):
            raise UserError(f"{column} = {self[column]!r} is no whole number")
        return int(number)

    @property
    def micro_batch(self) -> int | None:
        stated = _MICRO.search(self["layout"])
        return int(stated[1]) if stated else None

    def batch(self, gpus: int) -> int | None:
        """Samples of an update on so many GPUs; None where the row states none."""
        batch = self.count("global_batch") if self["global_batch"] else None
        if not self["batch_per_gpu"]:
            return batch
        of_all = self.number("batch_per_gpu") * gpus
        if of_all != (batch or int(of_all)):
            raise UserError(
                f"{gpus} GPUs with {self['batch_per_gpu']} samples each are not global_batch = {batch or int(of_all)}"
            )
        return int(of_all)

    def sample_time_s(self, value: float, gpus: int, batch: int | None) -> float | None:
        """Seconds a sample on so many GPUs, from a value in the row's unit; None for another unit, or for the seconds
        of a step without a batch."""
        unit = self["unit"].lower()
        if rate := _RATE.match(unit):
            size = self.count("seq_len") if rate[1] == "tokens" else 1
            return size / (value * (gpus if rate[2] else 1))
        if unit.startswith("s/epoch"):
            if not (images := _EPOCH.search(self["layout"])):
                raise UserError("its layout does not state the images of an epoch")
            return value / int(images[1])
        if batch and unit.startswith(("s/step", "s/iteration")):
            return value / batch
        return value / 1e3 / batch if batch and unit.startswith(("ms", "milliseconds")) else None

    def step_s(self, gpus: int, batch: int) -> float | None:
        """Seconds of the measured step: `step_ms`, which agrees with the measured value; None where the row has neither
        step_ms nor a known unit."""
        sample_s = self.sample_time_s(self.number("measured"), gpus, batch)
        step_s = self.number("step_ms") / 1e3 if self["step_ms"] else None
        if sample_s is None or step_s is None:
            return step_s if sample_s is None else sample_s * batch
        if abs(step_s / (sample_s * batch) - 1) > TOLERANCE:
            raise UserError(
                f"mixed units: {self['measured']} {self['unit']} give {1e3 * sample_s * batch:.6g} ms a step, step_ms "
                f"is {self['step_ms']}"
            )
        return step_s


def read_csv(path: Path) -> tuple[set[str], list[CsvRow], list[str]]:
    """The columns of a file, its rows, and a line for each row with other cells than the header. UserError where the
    file cannot be read."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = list(reader)
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error) if isinstance(error, csv.Error) else reason_of(error)
        raise UserError(f"{path} cannot be read ({reason}): give a CSV file in UTF-8") from error
    kept, left_out = list[CsvRow](), list[str]()
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            left_out.append(f"row {line}: it has {'more' if None in row else 'fewer'} cells than the header")
        else:
            texts = {name: shortened(printable(text.strip()), LONGEST_CELL) for name, text in row.items()}
            kept.append(CsvRow(line, texts))
    return set(reader.fieldnames or ()), kept, left_out
