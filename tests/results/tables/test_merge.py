"""Which attempts are repeats of one measurement, and which are copies of one attempt."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from ddlbench.results.tables.merge import AttemptRow, measured_options, measurements
from ddlbench.results.tables.run_rows import run_row
from ddlbench.results.tables.tables import records
from tests.support.records import CPU, GPU, attempts_of, edited, tables_of, write_run


def groups(results):
    """(status, repeat) of the attempts, group by group."""
    attempts = attempts_of(results)
    runs = [AttemptRow(run_row(attempt, []), measured_options(attempt.record["config"])) for attempt in attempts]
    return sorted(sorted((run.row["status"], run.row["repeat"]) for run in group) for group in measurements(runs))


def test_options_are_what_is_measured():
    config = {"results_dir": "r", "train": {"seed": 1, "timeout_s": 9.0}, "model": {"_target_": "a.B", "name": "m"}}
    assert measured_options(config) == {"train.seed": 1, "model.name": "m"}


NOT_COMPARABLE = (
    {"dataset": "b" * 64},
    {"train": {"precision": "bf16"}},
    {"train": {"seed": 1}},
    {"train": {"warmup_steps": 3}},
    {"train": {"compile": True}},
    {"recipe": {"name": "adamw"}},
    {"epochs": 4},
    {"loader": "dali"},
    {"device": "cpu"},
    {"sections": {"environment": {"gpu_model": "Another GPU", "torch": "2.14.1", "cuda": "13.0"}}},
    {"sections": {"environment": {"gpu_model": GPU, "torch": "2.13.0", "cuda": "13.0"}}},
    {"sections": {"environment": {"gpu_model": GPU, "torch": "2.14.1", "cuda": "12.8"}}},
)
ANOTHER_MEASUREMENT = (
    *NOT_COMPARABLE,
    {"gpus": 4},
    {"per_gpu": 16},
    {"train": {"steps": 5}},
    {"knobs": {"bucket_cap_mb": 50}},
    {"sections": {"launch": {"world_size": 2, "nodes": 2, "ranks_per_node": 1, "device_type": "cuda"}}},
)


@pytest.mark.parametrize("other", ANOTHER_MEASUREMENT, ids=str)
def test_what_differs_is_not_merged(tmp_path, other):
    write_run(tmp_path, repeat=0, gpus=2)
    write_run(tmp_path, **{"repeat": 1, "gpus": 2} | other)
    assert len(groups(tmp_path)) == 2


@pytest.mark.parametrize("other", NOT_COMPARABLE, ids=str)
def test_what_is_not_comparable_is_no_base(tmp_path, other):
    write_run(tmp_path, gpus=1, rate=100.0, **other)
    write_run(tmp_path, gpus=2, rate=150.0)
    (two,) = [row for row in records(tables_of(tmp_path).scaling) if row["gpus"] == 2]
    assert (two["speedup"], two["own_base_gpus"], two["scaling"]) == (None, 2, "single")


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ({"stage_to": "/scratch"}, 2),
        ({"stage_to": None, "name": "imagenet"}, 2),
        ({"stage_to": None, "root": "/elsewhere"}, 1),
    ],
    ids=str,
)
def test_data_are_the_same_wherever_they_lie_but_not_on_another_storage(tmp_path, data, count):
    for repeat, own in enumerate(({"stage_to": None}, data)):
        with edited(write_run(tmp_path, repeat=repeat)) as record:
            record["config"]["data"] |= own
    assert len(groups(tmp_path)) == count


EARLY = {"status": "error", "repeat": 1, "dataset": None}  # failed before the data set was known
OTHER = {"dataset": "b" * 64}
GROUPS = {
    "repeats and several tries": ([{}, {"attempt": 2}, {"repeat": 1}], [[("ok", 0), ("ok", 0), ("ok", 1)]]),
    "a batch however it was asked for": (
        [{"gpus": 2}, {"gpus": 2, "per_gpu": None, "global_batch": 64, "repeat": 1}],
        [[("ok", 0), ("ok", 1)]],
    ),
    "a failure joins the one group it fits": ([{}, EARLY], [[("error", 1), ("ok", 0)]]),
    "a failure that fits two is alone": ([{}, OTHER, EARLY], [[("error", 1)], [("ok", 0)], [("ok", 0)]]),
    "a failure of other data is alone": ([{}, OTHER | {"status": "oom"}], [[("ok", 0)], [("oom", 0)]]),
    "a failure with the default batch of 32 a GPU is none of another batch": (
        [{"global_batch": 512, "per_gpu": None}, {"global_batch": None, "per_gpu": None, "status": "oom", "repeat": 1}],
        [[("ok", 0)], [("oom", 1)]],
    ),
    "failures alone": ([{"status": "oom"}, EARLY], [[("error", 1), ("oom", 0)]]),
}


@pytest.mark.parametrize(("runs", "expected"), GROUPS.values(), ids=GROUPS)
def test_attempts_are_grouped_by_what_they_measure(tmp_path, runs, expected):
    for run in runs:
        write_run(tmp_path, **run)
    assert groups(tmp_path) == expected


def test_six_copies_are_no_six_repeats(tmp_path):
    folder = write_run(tmp_path / "results")
    for number in range(5):
        shutil.copytree(tmp_path / "results", tmp_path / f"backup{number}")
    tables = tables_of(tmp_path)
    (row,) = records(tables.scaling)
    assert (row["runs_ok"], row["interval"], row["sample_time_low_s"]) == (1, "n=1, no 95 % CI", None)
    assert len(tables.runs) == 1
    assert len(tables.epochs) == 3
    first, copy = (tmp_path / place / folder.relative_to(tmp_path / "results") for place in ("backup0", "results"))
    assert len(tables.warnings) == 5
    assert (
        f"{copy} and {first} hold the same attempt (run_id, attempt, start): only the latter counts" in tables.warnings
    )


@pytest.mark.parametrize("place", ["attempt-1.bak", "attempt-1/attempt-1", "attempt-1 (copy)", "../other/attempt-7"])
def test_a_copy_in_any_folder_counts_once(tmp_path, place):
    folder = write_run(tmp_path)
    shutil.copytree(folder, tmp_path / "aside")
    (folder.parent / place).parent.mkdir(exist_ok=True)
    (tmp_path / "aside").rename(folder.parent / place)
    tables = tables_of(tmp_path)
    assert list(tables.scaling["runs_ok"]) == [1]
    assert len(tables.warnings) == 1


def test_the_same_command_at_another_time_is_a_repeat(tmp_path):
    """Two results_dir, each with a first attempt at the same run."""
    write_run(tmp_path / "a")
    times = {"start": "2026-01-01T10:00:00.001+00:00", "end": None}
    write_run(tmp_path / "b", sections={"times": times})
    assert list(tables_of(tmp_path).scaling["runs_ok"]) == [2]


@pytest.mark.parametrize("early", ["a", "b"])
def test_the_later_state_counts_where_a_copy_was_made_during_the_run(tmp_path, early):
    for place in ("a", "b"):
        folder = write_run(tmp_path / place)
        if place == early:
            with edited(folder) as record:
                record |= {"status": "running", "summary": {}}
            lines = (folder / "epochs.jsonl").read_text().splitlines(keepends=True)
            (folder / "epochs.jsonl").write_text(lines[0])
    tables = tables_of(tmp_path)
    assert list(tables.runs["status"]) == ["ok"]
    assert len(tables.epochs) == 3
    assert f"{tmp_path / early}" in tables.warnings[0].split(" and ")[0]
    assert "though their content differs" in tables.warnings[0]


def test_without_a_start_only_equal_records_are_copies(tmp_path):
    for place, rate in (("a", 100.0), ("b", 100.0), ("c", 101.0)):
        write_run(tmp_path / place, rate=rate, sections={"times": {"start": None}})
    assert list(tables_of(tmp_path).scaling["runs_ok"]) == [2]


def test_unreadable_records_are_all_there(tmp_path):
    for place in ("a", "b"):
        (write_run(tmp_path / place) / "run.json").write_text("{")
    assert list(tables_of(tmp_path).runs["status"]) == ["unreadable", "unreadable"]


ENVIRONMENT = {
    "torch": "2.14.1", "cuda": "13.0", "gpu_model": GPU, "driver": "550.54", "nccl": "2.27.3", "kernel": "6.1",
    "gpu_power_limit_w": 400.0, "cpu_model": CPU, "switches": {"cudnn.benchmark": False},
    "packages": {"deepspeed": "0.19.8"}, "variables": {"NCCL_ALGO": "Tree"},
}  # fmt: skip


def six(results, gpus=2, **other):
    """Three usual runs and three with another value in their environment."""
    for repeat in range(6):
        environment = ENVIRONMENT | (other if repeat >= 3 else {})
        write_run(results, framework="zero1", gpus=gpus, repeat=repeat, sections={"environment": environment})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"packages": {"deepspeed": "0.18.1"}}, {"deepspeed=0.18.1", "deepspeed=0.19.8"}),
        ({"driver": "560.1"}, {"driver=550.54", "driver=560.1"}),
        ({"nccl": "2.30.7"}, {"nccl=2.27.3", "nccl=2.30.7"}),
        ({"gpu_power_limit_w": 300.0}, {"gpu_power_limit_w=300.0", "gpu_power_limit_w=400.0"}),
        ({"variables": {"NCCL_ALGO": "Ring"}}, {"NCCL_ALGO=Ring", "NCCL_ALGO=Tree"}),
        ({"variables": {}}, {None, "NCCL_ALGO=Tree"}),
    ],
    ids=["packages", "driver", "nccl", "power limit", "variable", "no variable"],
)
def test_another_environment_is_another_measurement_and_is_named(tmp_path, other, named):
    six(tmp_path, **other)
    rows = records(tables_of(tmp_path).scaling)
    assert [row["runs_ok"] for row in rows] == [3, 3]
    assert {row["knobs"] for row in rows} == named


def test_what_differs_from_host_to_host_is_merged_with_a_warning(tmp_path):
    six(tmp_path, kernel="6.2", hostname="node9", memory_total_bytes=1)
    tables = tables_of(tmp_path)
    assert list(tables.scaling["runs_ok"]) == [6]
    assert tables.warnings == [
        "repeats are merged: zero1 on 2, resnet50, differ in kernel "
        '("6.1": repeat 0, repeat 1, repeat 2; "6.2": repeat 3, repeat 4, repeat 5)'
    ]


def with_environment(**changed: Any) -> dict[str, Any]:
    return {"sections": {"environment": ENVIRONMENT | changed}}


@pytest.mark.parametrize(
    "other",
    [
        {"train": {"micro_batch": 8}},
        {"knobs": {"bucket_cap_mb": 50}},
        with_environment(driver="2"),
        with_environment(packages={"deepspeed": "0.18.1"}),
        with_environment(switches={"cudnn.benchmark": True}),
        with_environment(nccl="2.30.7"),
        with_environment(gpu_power_limit_w=300.0),
        with_environment(cpu_model="Another CPU"),
    ],
    ids=str,
)
def test_an_own_base_has_the_same_settings_versions_switches_and_host(tmp_path, other):
    usual = with_environment()
    for gpus, rate, attempt, changed in ((1, 100.0, 1, {}), (1, 80.0, 2, other), (2, 120.0, 2, other)):
        with edited(write_run(tmp_path, gpus=gpus, rate=rate, attempt=attempt, **usual | changed)) as record:
            record["environment"]["variables"] = {"OMP_NUM_THREADS": str(gpus)}
    tables = tables_of(tmp_path)
    two = tables.scaling[tables.scaling["gpus"] == 2].iloc[0]
    assert two["speedup_vs_own_base"] == pytest.approx(1.5), "the 80 samples/s of the same settings and environment"
    assert two["speedup"] == pytest.approx(1.2), "the best single GPU may have others"
    named = [text for text in tables.warnings if "not the same environment: resnet50, differs in " in text]
    assert len(named) == ("sections" in other)


def test_versions_are_columns(tmp_path):
    packages = {"deepspeed": "0.19.8", "torchvision": "0.29.1", "nvidia-dali-cuda120": "2.4.0"}
    library = "deepspeed 0.19.8"
    sections = {"environment": ENVIRONMENT | {"packages": packages}, "framework_library": library}
    write_run(tmp_path, sections=sections)
    tables = tables_of(tmp_path)
    run, row = tables.runs.iloc[0], tables.scaling.iloc[0]
    assert (run["framework_library"], run["deepspeed"], run["dali"]) == (library, "0.19.8", "2.4.0")
    assert (row["framework_library"], row["driver"], row["nccl"]) == (library, "550.54", "2.27.3")


def test_ranks_that_differed_are_a_warning_of_the_report(tmp_path):
    folder = write_run(tmp_path, sections={"ranks_differ": ["rank 1 on b has driver 2, rank 0 on a has 1"]})
    assert f"{folder}: rank 1 on b has driver 2, rank 0 on a has 1" in tables_of(tmp_path).warnings
