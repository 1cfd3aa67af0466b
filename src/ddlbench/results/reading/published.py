"""Measurements that others published, and their records. Each row of a CSV file is one: its numbers, units and batches,
the seconds that they give, and the base that its source compares it with.

A row that contradicts itself or cannot be understood is left out and named, never repaired.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from ddlbench.errors import UserError
from ddlbench.foreign import Object, read_bytes, section
from ddlbench.record.schema import SCHEMA_VERSION
from ddlbench.results.reading.attempts import reason_of
from ddlbench.results.rows import PUBLISHED, Row, group_by
from ddlbench.texts import counted, digest, first_few, printable, shortened

COLUMNS = (
    "source", "model", "framework", "strategy", "gpus", "gpus_per_node", "gpu_type", "network", "batch_per_gpu",
    "global_batch", "precision", "measured", "unit", "one_gpu_value", "base_gpus", "base_value", "step_ms", "layout",
    "seq_len", "loader", "in_scope", "tier", "quote", "url",
)  # fmt: skip
OPTIONAL = ("one_gpu_value", "loader", "in_scope", "tier", "quote")
KEPT = ("measured", "unit", "base_value", "network", "layout", "tier", "in_scope")  # as they stand in the row
UNITS = ("img/s", "seq/s", "tokens/s", "each also /GPU", "s/epoch", "s/step", "ms")
TOLERANCE = 0.01  # between two cells that say the same: sources round
LONGEST_CELL = 300  # letters
_RATE = re.compile(
    r"(?:(tok(?:en)?s?)|im(?:a)?g(?:e)?s?|seq(?:uence)?s?|samples?|examples?|sentences?)"
    r"(/gpu)?(?:/| per )s(?:ec|econd)?\b([ ,(]*(?:/|per |each )gpu)?"
)
_SECONDS = re.compile(r"(m(?:illi)?)?s(?:ec(?:ond)?s?)?\b(?: ?(?:/|per )(step|it(?:er(?:ation)?)?|update)s?\b)?")
_ANOTHER = re.compile(r"/|\bper\b|\beach\b")  # a rate or a time of something else: a node, a chip, a sample
_EPOCH = re.compile(r"\b([1-9][0-9,]*) images (?:an|per) epoch\b")
_MICRO = re.compile(r"\bmbs([1-9][0-9]*)\b")
GPU = re.compile(
    r"(?:(?<![a-z0-9])|(?<=\dx))(GB[23]00|GH200|B[23]00|H[128]00|H20|A[18]00|A[34]0|L40|L4|T4|V100|P100|P40|K80|MI[0-9]{3}"
    r"|A6000|RTX ?(?:A[0-9]{4}|[0-9]{4}))",
    re.IGNORECASE,
)


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
        """Between 1e-9 and 1e15: any other number is a mistake."""
        try:
            number = float(self[column])
        except ValueError:
            number = 0.0
        if not 1e-9 < number < 1e15:  # false for nan
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
        """The seconds a sample on so many GPUs that a value in the row's unit gives. None if the unit is unknown, or if
        it is that of a step and the batch is unknown."""
        unit = self["unit"].lower()
        if (rate := _RATE.match(unit)) and not _ANOTHER.search(unit[rate.end() :]):
            size = self.count("seq_len") if rate[1] else 1
            return size / (value * (gpus if rate[2] or rate[3] else 1))
        if unit.startswith("s/epoch"):
            if not (images := _EPOCH.search(self["layout"])):
                raise UserError("its layout does not state the images of an epoch")
            return value / int(images[1].replace(",", ""))
        step = _SECONDS.match(unit)
        if not batch or not step or _ANOTHER.search(unit[step.end() :]) or not (step[1] or step[2]):
            return None  # seconds alone may be the time of anything
        return value / (1e3 if step[1] else 1) / batch

    def step_s(self, gpus: int, batch: int) -> float | None:
        """Seconds of the measured step: `step_ms`, which must agree with the measured value. None where the row has
        neither step_ms nor a known unit."""
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
    """Columns, rows, and a line for each row with other cells than the header. UserError for an unreadable file."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error) if isinstance(error, csv.Error) else reason_of(error)
        raise UserError(f"{path} cannot be read ({reason}): give a CSV file in UTF-8") from error
    kept, left_out = list[CsvRow](), list[str]()
    for line, row in rows:
        if None in row or None in row.values():
            left_out.append(f"row {line}: it has {'more' if None in row else 'fewer'} cells than the header")
        else:
            texts = {name: shortened(printable(text.strip()), LONGEST_CELL) for name, text in row.items()}
            kept.append(CsvRow(line, texts))
    return set(reader.fieldnames or ()), kept, left_out


def read_points(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file that can be used, and a line for each of the others. Rows of one source and model in several
    units cannot be used. UserError where the file cannot be read or has other columns."""
    columns, rows, left_out = read_csv(path)
    if wrong := sorted((columns ^ set(COLUMNS)) - set(OPTIONAL)):
        odd = ", ".join(first_few([shortened(printable(name), 40) for name in wrong], 5))
        raise UserError(f"{path} has other columns (missing or unknown: {odd}): give {', '.join(COLUMNS)}")
    points, kept = list[Row](), list[Row]()
    for row in rows:
        try:
            points.append(_facts(row))
        except UserError as error:
            left_out.append(f"row {row.line}: {error}")
    for (source, model), group in group_by(points, itemgetter("source", "model")).items():
        if len(units := sorted({point["unit"] for point in group})) == 1:
            kept += group
        else:
            lines = ", ".join(first_few([str(point["line"]) for point in group], 20))
            left_out.append(f"row {lines}: {source}, {model}: mixed units ({', '.join(units)})")
    return sorted(kept, key=itemgetter("line")), left_out


def _facts(row: CsvRow) -> Row:
    """The facts of a row, as `record_of` takes them, and the number of its line."""
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
    return {
        **row.cells,
        "line": row.line,
        "gpus": gpus,
        "nodes": nodes,
        "sample_time_s": seconds,
        "global_batch": batch,
        # Equal for all rows of a source with the same base, and for the base itself.
        "series": f"{counted(base_gpus, 'GPU')} at {base_value:g} {row['unit'].partition(' ')[0]}",
        "micro_batch": row.micro_batch,
        "seq_len": row.count("seq_len") if row["seq_len"] else None,
        "more": {**{name: row[name] or None for name in KEPT}, **stated},
    }


def _sample_time_s(row: CsvRow, value: float, gpus: int, batch: int | None) -> float:
    seconds = row.sample_time_s(value, gpus, batch)
    if seconds is None:
        raise UserError(f"unknown unit {row['unit']!r}, or its batch is not stated: known are {', '.join(UNITS)}")
    return seconds


def record_of(facts: Row) -> Object:
    """The record of one run, without what is not known. Equal facts from any address have the same run_id.

    facts: the statements of a source, in its words, by the columns of COLUMNS, and:
        sample_time_s, nodes; repeat, recipe, system (the name), seed, train_samples
        series:      equal for runs of the source with the same base
        micro_batch: samples of a forward pass
        environment: as in run.json, without the GPU
        summary:     what the summary of run.json has beside the rates, which follow from sample_time_s
        epochs:      lines as in epochs.jsonl
        more:        other entries of the section `published`
    """
    fact, gpus, rate = facts.get, facts["gpus"], 1 / facts["sample_time_s"]
    tokens, micro_batch = fact("seq_len"), fact("micro_batch")
    config = {
        "mode": "train",
        "source": facts["source"],
        "series": fact("series"),
        "framework": {"name": facts["strategy"], "library": fact("framework")},
        "model": {"name": facts["model"], "tokens_per_sample": tokens},
        "loader": {"name": fact("loader") or None},
        "recipe": {"name": fact("recipe")},
        "cluster": {"name": fact("system")},
        "train": {"precision": fact("precision") or None, "micro_batch": micro_batch, "repeat": fact("repeat", 0)},
    }
    launch = {
        "world_size": gpus,
        "nodes": facts["nodes"],
        "ranks_per_node": gpus // facts["nodes"],
        "device_type": "cuda",
    }
    summary = {"throughput_samples_per_s": rate, "throughput_samples_per_s_per_gpu": rate / gpus}
    if tokens:
        summary["tokens_per_s"] = rate * tokens
    sections = {
        "config": config,
        "launch": launch,
        "environment": {"gpu_model": facts["gpu_type"], **fact("environment", {})},
        "framework_library": fact("framework"),
        "model": {"name": facts["model"], "changed": {}, "tokens_per_sample": tokens},
        "dataset": {"train_samples": fact("train_samples")},
        "ledger": {"global_batch": fact("global_batch"), "micro_batch": micro_batch, "seed": fact("seed")},
        "summary": summary | fact("summary", {}),
        "epochs": fact("epochs", []),
    }
    name = re.sub(r"[^a-z0-9.]+", "_", f"{facts['source']} {facts['model']}".lower())[:48].strip("_")
    head = {
        "schema_version": SCHEMA_VERSION,
        "origin": PUBLISHED,
        "run_id": f"{name}-{gpus}x-{digest(sections, 12)}",
        "attempt": 1,
        "status": "ok",
    }
    return head | _stated(sections | {"published": {"source": facts["source"], "url": facts["url"], **facts["more"]}})


def _stated(values: Object) -> Object:
    """Only the values that are stated, also in sections; `changed` stays: it is empty where nothing differs."""
    parts = {
        key: _stated(value) if isinstance(value, dict) and key != "changed" else value for key, value in values.items()
    }
    return {key: value for key, value in parts.items() if key == "changed" or value not in (None, {}, [])}


def csv_row(record: Object, line: int) -> CsvRow:
    """The row of which a record was made, without what the record does not keep (quote, step_ms)."""
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


def gpu_family(text: str) -> str | None:
    """The GPU that a text names: "A100" in "NVIDIA A100-SXM-80GB (500W)"; None where it names no known one."""
    match = GPU.search(text)
    return re.sub("^RTX ?", "RTX ", match[1].upper()) if match else None
