"""The data dictionary holds together, agrees with its page and with what the harness writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ddlbench.measure.rows import NOT_IN_LINE, EpochRow
from ddlbench.record import schema
from ddlbench.record.schema import CLOCKS, EPOCHS, KINDS, RANKS, RUNS, SCALING
from scripts.pages.data_dictionary import markdown

PAGE = Path(__file__).parents[2] / "docs" / "data-dictionary.md"
TABLES = {
    "runs": RUNS, "epochs": EPOCHS, "steps": schema.STEPS, "ranks": schema.RANK_EPOCHS, "scaling": SCALING,
    "breakdown": schema.BREAKDOWN, "learning": schema.LEARNING, "targets": schema.TARGETS,
}  # fmt: skip


def test_the_page_is_the_schema():
    assert PAGE.read_text() == markdown(), "run `make docs`"


ENDINGS = {"s": ("_s",), "bytes": ("_bytes",), "samples/s": ("_samples_per_s", "_samples_per_s_per_gpu")}


@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
def test_every_column_says_what_it_is_and_carries_its_unit_in_its_name(columns):
    for column in columns:
        assert column.kind in KINDS, column.name
        assert column.ranks in RANKS, column.name
        assert column.clock in ("", *CLOCKS), column.name
        assert column.clock or column.unit != "s", f"{column.name} says no clock"
        assert column.meaning, column.name
        assert "|" not in column.meaning, "would break the page's table"
        assert column.name.endswith(ENDINGS.get(column.unit, "")) or column.name.startswith("seconds_"), column.name


def test_what_the_harness_writes_is_in_the_dictionary():
    own = {field.name for field in fields(EpochRow)} - set(NOT_IN_LINE) | {"train_loss", "throttle_reasons"}
    assert own <= {column.source for column in EPOCHS}


def test_scaling_copies_only_what_runs_have():
    names = {column.name for column in RUNS}
    assert {column.name for column in SCALING if column.source} <= names
    assert {column.source for column in SCALING} <= {"", "equal", "median", "max"}
    assert {column.name for column in EPOCHS if column.source == "run"} <= names


def test_every_number_that_is_read_with_a_unit_has_a_range():
    read = [column for column in (*RUNS, *EPOCHS) if column.source not in ("", "run")]
    numbers = [column for column in read if column.kind in ("int", "float")]
    assert [column.name for column in numbers if column.unit and not column.range] == []
    assert all(column.range[0] < column.range[1] for column in numbers if column.range)
