"""Values of JSON as cells: what does not fit is left out, with a note."""

from __future__ import annotations

import pytest

from ddlbench.record.schema import EPOCHS, RUNS
from ddlbench.results.reading.cells import LONGEST_NAME, cell, fit

COLUMNS = {column.name: column for column in (*EPOCHS, *RUNS)}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, "int", 3),
        (3.0, "int", 3),
        (3.5, "int", None),
        (True, "int", None),
        ("3", "int", None),
        (["a.jpg", "b.jpg"], "int", None),
        (2**63 - 1, "int", 2**63 - 1),
        (2**63, "int", None),
        (1e300, "int", None),
        (10**400, "float", None),
        ("2.5", "float", None),
        ("NaN", "float", None),
        (True, "float", None),
        ([], "int", None),
        (2, "float", 2.0),
        (float("nan"), "float", None),
        (float("inf"), "float", None),
        (0, "float", 0.0),
        ("node1", "text", "node1"),
        (["node1", "node2"], "text", "node1 node2"),
        ({"b": 1, "a": 2}, "text", '{"a": 2, "b": 1}'),
        ({}, "text", None),
        (False, "bool", False),
        (0, "bool", None),
    ],
)
def test_cells(value, kind, expected):
    assert cell(value, kind) == expected
    assert type(cell(value, kind)) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("epoch_time_s", -1.0, "epoch_time_s = -1.0 (must lie in 1e-06 to 1e+09)"),
        ("epoch_time_s", float("nan"), "epoch_time_s = NaN (not a finite number)"),
        ("epoch_time_s", "3", 'epoch_time_s = "3" (not a finite number)'),
        ("val_top1", 1.5, "val_top1 = 1.5 (must lie in 0 to 1)"),
        ("mfu", -0.1, "mfu = -0.1 (must lie in 0 to 1)"),
        ("val_perplexity_token", 0.5, "val_perplexity_token = 0.5 (must lie in 1 to 1e+30)"),
        ("gpus", 0, "gpus = 0 (must lie in 1 to 1e+06)"),
        ("samples", -5, "samples = -5 (must lie in 0 to 1e+12)"),
        ("samples", 2.5, "samples = 2.5 (not a whole number of 64 bits)"),
        (
            "memory_host_peak_bytes",
            2**70,
            "memory_host_peak_bytes = 1180591620717411303424 (not a whole number of 64 bits)",
        ),
        ("warmup", "yes", 'warmup = "yes" (not true or false)'),
    ],
)
def test_what_does_not_fit_is_left_out_and_noted(name, value, note):
    left_out = []
    assert fit(value, COLUMNS[name], left_out) is None
    assert left_out == [note]


@pytest.mark.parametrize("value", [None, [], {}])
def test_what_is_not_known_needs_no_note(value):
    left_out = []
    assert fit(value, COLUMNS["epoch_time_s"], left_out) is None
    assert left_out == []


@pytest.mark.parametrize(("name", "value"), [("cpu_share", 3.5), ("mfu", 1.0), ("val_loss", 0.0), ("epoch", 0)])
def test_the_ends_of_a_range_belong_to_it(name, value):
    left_out = []
    assert (fit(value, COLUMNS[name], left_out), left_out) == (value, [])


def test_long_names_are_cut_and_stay_different():
    one, other = (fit("x" * 100_000 + end, COLUMNS["framework"], []) for end in "ab")
    assert len(one) == len(other) == LONGEST_NAME
    assert one != other
    hosts = " ".join(f"node{number}" for number in range(500))
    assert fit(hosts, COLUMNS["hosts"], []) == hosts
