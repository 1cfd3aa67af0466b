"""A record may lack any key: the cells of the key are empty, all others and the other runs stay as they are."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy

import pytest

from ddlbench.errors import UserError
from ddlbench.record.schema import EPOCHS, RUNS
from ddlbench.report.explain import explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables, records
from tests.support.records import GIB, tables_of, write_run

NEEDED = ("schema_version", "status")  # without them nothing of the record is used
# What write_run leaves out, so that every section of a record has keys.
MORE = {
    "loader": {"workers": 2, "prefetch": 2},
    "spans": {"imports_s": 3.0, "connecting_s": 0.5, "setup_s": 2.0},
    "staging": {"seconds": 1.0, "copied_bytes": 5},
    "cold_cache": {"bytes": 10, "left_bytes": 0, "nodes": 1, "epochs": 3},
    "framework_library": "torch 2.14.1",
    "ranks_differ": [],
    "profile": {"status": "ok", "steps": 5, "window_s": 4.0, "step_s": 0.8, "compute_share": 0.5, "idle_share": 0.5},
}
MORE_SUMMARY = {
    "tokens_per_s": 5.0, "step_time_median_s": 0.1, "step_time_p95_s": 0.2, "first_step_s": 0.3,
    "epoch_first_step_s": 0.2, "throughput_steady_samples_per_s": 90.0, "data_wait_share": 0.1, "host_wait_share": 0.1,
    "data_wait_mean_share": 0.1,
    "straggler_wait_s": 0.1, "memory_reserved_peak_bytes": 5 * GIB, "allocator_retries": 0, "energy_epoch_j": 5.0,
    "load_start": 0.5, "own_step_s": 0.1, "own_step_median_rank_s": 0.1, "own_step_source": "window", "startup_s": 4.0,
    "hfu": 0.3, "cpu_others_share": 0.2,
}  # fmt: skip
COMPUTED_TOO = ("global_batch", "micro_batch", "startup_s")  # with another way to know it than its source


def every_key(record, above=""):
    """The dotted names of all keys and sections."""
    for key, value in record.items():
        yield above + key
        if isinstance(value, dict):
            yield from every_key(value, f"{above}{key}.")


def without(record, dotted):
    left = deepcopy(record)
    *sections, key = dotted.split(".")
    place = left
    for section in sections:
        place = place[section]
    del place[key]
    return left


@pytest.fixture
def full(tmp_path):
    """A folder with two good runs, and the record of the second, with seed 1, that others are made from."""
    write_run(tmp_path, framework="good")
    folder = write_run(tmp_path, train={"seed": 1}, sections=MORE, summary=MORE_SUMMARY)
    return tmp_path, json.loads((folder / "run.json").read_text()), (folder / "epochs.jsonl").read_text()


def add(results, number, record, epochs):
    folder = results / f"odd-{number}" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record | ({"run_id": f"odd-{number}"} if "run_id" in record else {})))
    (folder / "epochs.jsonl").write_text(epochs)
    return str(folder)


def rows_by_path(tables):
    return {row["path"]: row for row in records(tables.runs)}


def said_by(column, dotted):
    """Whether all sources of a column are the key, or below it."""
    return bool(column.source) and all(
        source == dotted or source.startswith(f"{dotted}.") for source in column.source.split("|")
    )


def test_every_key_of_run_json_may_be_missing(full):
    results, record, epochs = full
    before = rows_by_path(tables_of(results))
    complete = next(row for row in before.values() if row["seed"] == 1)
    names = [name for name in every_key(record) if name not in NEEDED]
    assert len(names) > 100
    assert {name.partition(".")[0] for name in names} >= {"config", "launch", "ledger", "summary", "spans", "profile"}
    paths = {add(results, number, without(record, name), epochs): name for number, name in enumerate(names)}
    tables = tables_of(results)
    after = rows_by_path(tables)
    for path, row in before.items():
        assert {**after[path], "measurement": 0, "learning": 0} == {**row, "measurement": 0, "learning": 0}
    for path, name in paths.items():
        row = after[path]
        assert row["status"] == "ok", name
        for column in RUNS:
            if not column.source or column.name in ("run_id", *COMPUTED_TOO) or name.startswith(f"{column.source}."):
                continue  # the last: the cell is the whole section
            expected = None if said_by(column, name) else complete[column.name]
            if "|" not in column.source:
                assert row[column.name] == expected, (name, column.name)
    assert not [warning for warning in tables.warnings if "cannot be used" in warning]


def test_every_key_of_an_epoch_may_be_missing(full):
    results, record, epochs = full
    lines = [json.loads(line) for line in epochs.splitlines()]
    names = [name for name in lines[0] if name != "epoch"]
    paths = {}
    for number, name in enumerate(names):
        text = "\n".join(json.dumps(without(line, name) if n == 1 else line) for n, line in enumerate(lines))
        paths[add(results, number, record, text)] = name
    rows = records(tables_of(results).epochs)
    own = [column for column in EPOCHS if column.source not in ("", "run")]
    for path, name in paths.items():
        result = [row for row in rows if row["path"] == path]
        assert [row["epoch"] for row in result] == [0, 1, 2], name
        for column in own:
            expected = [line.get(column.source) for line in lines]
            if column.source == name:
                expected[1] = None
            assert [row[column.name] for row in result] == expected, (name, column.name)


def test_every_key_may_be_missing_where_a_run_is_explained(full):
    """A run is explained without the key, or refused in one line; it may be comparable with all others."""
    results, record, epochs = full
    line = {"rank": 0, "host": "node1", "stage": 0, "compute_s": 1.0, "exposed_s": 0.2, "data_s": 0.1, "idle_s": 0.1}
    record["launch"]["world_size"] = 2
    record["profile"] |= {"ranks": [line, line | {"rank": 1, "exposed_s": 0.1}]}
    record["summary"] |= {"straggler_rank": 1, "straggler_host": "node1"}
    read_by_it = ("config", "launch", "ledger", "profile", "summary.own_step_s", "summary.straggler_rank")
    lacking = [without(record, name) for name in every_key(record) if name.startswith(read_by_it)]
    ranks = [[without(line, name), line] for name in line] + [[line | {"rank": 1}], []]
    profiles = [record["profile"] | changed for changed in ({"steps": 0}, *({"ranks": one} for one in ranks))]
    lacking += [record | {"profile": profile} for profile in profiles]
    paths = [add(results, number, odd, epochs) for number, odd in enumerate(lacking)]
    read = read_all([results])
    tables, explained = make_tables(read), 0
    for path in paths:
        with suppress(UserError):
            explained += sum(bar.seconds or 0 for bar in explain(tables, read, path).bars) > 0
    assert len(paths) - 10 < explained < len(paths)
