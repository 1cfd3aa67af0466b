"""report.html: the whole report in one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from ddlbench.record.schema import CLOCKS, EPOCHS, RANKS, RUNS, SCALING, Column
from ddlbench.report.compare import comparisons
from ddlbench.report.labels import marked
from ddlbench.report.merge import Row, group_by
from ddlbench.report.overview import MEASURED, SETTINGS, VS_OWN, VS_SINGLE, base_lines, notes, overview_cells
from ddlbench.report.tables import Tables, records

ROWS_SHOWN = 500  # of the epochs' table; the file beside the page has all
MADE_WITH = ("device_model", "nodes", "torch", "cuda", "cudnn", "nccl", "driver", "python", "git_commit", "git_dirty")
DATASET = ("data", "dataset_hash", "dataset_train_samples", "dataset_val_samples")
EXPLAINED = (
    "epoch_time_s",
    "throughput_samples_per_s",
    "tokens_per_s",
    "validation_time_s",
    "startup_s",
    "first_step_s",
    "data_wait_share",
    "straggler_wait_s",
    "val_top1",
    "val_perplexity_token",
    "memory_allocated_peak_bytes",
    "memory_host_peak_bytes",
    "mfu",
)


def render(tables: Tables, figures: Mapping[str, Figure], folder: Path) -> str:
    """The page with the figures, which are SVG files in `folder`."""
    plain_runs, plain_scaling = records(tables.runs), records(tables.scaling)
    runs, scaling = marked(plain_runs), marked(plain_scaling, plain_runs)
    headers, lines = overview_cells(scaling, MEASURED | VS_SINGLE | VS_OWN | SETTINGS)
    loader = jinja2.PackageLoader("ddlbench.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html.j2").render(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        attempts=len(runs),
        ok=sum(run["status"] == "ok" for run in runs),
        headers=headers,
        lines=[(row["status"], cells) for row, cells in zip(scaling, lines, strict=True)],
        notes=[*base_lines(scaling), *notes(scaling), *([tables.drift] if tables.drift else [])],
        cautions=[*tables.warnings, *cautions(runs, scaling)],
        figures={name: (image(folder / f"{name}.svg"), drawn.get_figwidth()) for name, drawn in figures.items()},
        comparisons=comparisons(scaling),
        failures=[run for run in runs if run["status"] != "ok"],
        explained=[column for column in RUNS if column.name in EXPLAINED],
        over_ranks=RANKS,
        clocks=CLOCKS,
        versions=counted(runs, MADE_WITH),
        datasets=counted(runs, DATASET),
        tables={
            "scaling": grid(SCALING, plain_scaling),
            "runs": grid(RUNS, plain_runs),
            "epochs": grid(EPOCHS, records(tables.epochs)[:ROWS_SHOWN]),
        },
        epochs=len(tables.epochs),
    )


def image(path: Path) -> str:
    """An SVG as a data URL: its names cannot clash with those of other figures in the page."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def cautions(runs: Sequence[Row], scaling: Sequence[Row]) -> list[str]:
    """Warnings about the trustworthiness of the numbers."""
    dirty = sum(bool(run["git_dirty"]) for run in runs)
    found = [f"{dirty} attempt(s) ran with uncommitted changes of ddlbench's code"] if dirty else []
    for row in scaling:
        name = f"{row['framework']}, {row['model']}, {row['gpus']} GPUs"
        if row["allocator_retries"]:
            found.append(f"{name}: {row['allocator_retries']} allocator retries made the timing unreliable")
        if len((row["git_commits"] or "").split()) > 1:
            found.append(f"{name}: repeats of different commits of ddlbench are merged")
    return list(dict.fromkeys(found))


def counted(runs: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The distinct combinations of some columns, with the number of attempts of each."""
    known = [run for run in runs if any(run[name] is not None for name in names)]
    groups = group_by(known, lambda run: tuple(run[name] for name in names))
    lines = [
        [*(text(name, value) for name, value in zip(names, key, strict=True)), str(len(group))]
        for key, group in groups.items()
    ]
    return {"headers": [*names, "attempts"], "lines": lines}


def grid(columns: Sequence[Column], rows: Sequence[Row]) -> dict[str, Any]:
    """A whole table: its columns and its cells as text."""
    return {"columns": columns, "lines": [[text(column.name, row[column.name]) for column in columns] for row in rows]}


def text(name: str, value: Any) -> str:
    """A cell for reading: six digits of a number, twelve of a hash; the CSV file has all."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)[:12] if name.endswith(("_hash", "git_commit", "hash_start")) else str(value)
