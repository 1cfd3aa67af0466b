from __future__ import annotations

import pytest

from ddlbench.measure.devices.usage import Load
from ddlbench.measure.summary import load_columns, marks, sees_one_gpu

QUIET = Load(load=0.1, pressure=0.02, stolen=0, ticks=1000)


def test_the_node_with_the_most_counts_and_each_node_steals_for_itself() -> None:
    before = [QUIET, Load(load=0.4, pressure=None, stolen=50, ticks=2000)]
    after = [Load(load=2.0, pressure=0.05, stolen=10, ticks=1100), Load(0.3, None, 51, 2200)]
    assert load_columns(before, after) == {
        "load_start": 0.4,
        "load_end": 2.0,
        "cpu_pressure_start": 0.02,
        "cpu_pressure_end": 0.05,
        "cpu_steal_share": 0.1,  # 10 of 100 ticks; 1 of 200 on the other
        "cpu_others_share": None,
    }


@pytest.mark.parametrize(
    ("figure", "most"),
    [("cpu_others_share", 0.1), ("cpu_pressure_start", 0.1), ("cpu_pressure_end", 0.1), ("cpu_steal_share", 0.01)],
)
def test_each_figure_above_its_limit_is_a_mark(figure: str, most: float) -> None:
    quiet = load_columns([QUIET], [QUIET])
    name = {"cpu_others_share": "load", "cpu_steal_share": "steal"}.get(figure, "cpu pressure")
    assert marks([], 0, quiet | {figure: most}) == []
    assert marks([], 0, quiet | {figure: most + 0.001}) == [name]


@pytest.mark.parametrize(
    ("ranks_per_node", "visible", "backend", "marked"),
    [
        (4, 1, "nccl", True),
        (4, 4, "nccl", False),
        (1, 1, "nccl", False),
        (4, 1, "nccl (shared GPU)", False),
        (4, 0, "gloo", False),
    ],
)
def test_several_ranks_of_a_node_that_see_one_gpu_each_are_a_mark(
    ranks_per_node: int, visible: int, backend: str, marked: bool
) -> None:
    assert sees_one_gpu({"ranks_per_node": ranks_per_node, "backend": backend}, visible) == marked


def test_a_run_may_have_several_marks_and_its_own_load_is_none() -> None:
    unknown = load_columns([], [])
    assert set(unknown.values()) == {None}
    assert (
        marks([], 0, unknown | {"load_start": 8.0, "load_end": 8.0}) == []
    )  # load averages: the run before is in them
    assert marks(["power cap"], 3, unknown, ["read ahead"]) == ["throttled", "allocator retries", "read ahead"]
