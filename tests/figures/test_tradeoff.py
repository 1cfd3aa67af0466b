"""Memory against throughput."""

from __future__ import annotations

from typing import Any

import matplotlib.figure
from hypothesis import given
from hypothesis import strategies as st

from ddlbench.figures.figures import front, tradeoff
from ddlbench.figures.panels import Panel
from ddlbench.figures.plotting import looks_of
from ddlbench.results.tables.measurement import Measurement
from ddlbench.texts import GIB

NONE = dict.fromkeys(("knobs", "across", "sample_time_low_s", "sample_time_high_s", "own_base_gpus", "base_gpus"))


def row(framework: str, gib: float | None, rate: float | None) -> Measurement:
    memory = None if gib is None else gib * GIB
    values: dict[str, Any] = {"framework": framework, "compared": framework, "gpus": 2, "device": "cuda"}
    times = {"sample_time_s": 1 / rate if rate else None, "memory_allocated_peak_bytes": memory}
    return Measurement({**values, "status": "ok" if rate else "oom", **NONE, **times})


def drawn_of(rows: list[Measurement]) -> Any:
    """The axes of a panel."""
    plot = tradeoff([Panel("gpt2", [], "", rows)], looks_of(row.curve_key for row in rows))
    axes = matplotlib.figure.Figure().add_subplot()
    plot.draw(axes, plot.panels[0])
    return axes


def test_markers_are_memory_and_throughput_and_a_line_joins_those_that_none_beats() -> None:
    """zero1 needs more memory than zero3 for the same throughput; a run that ended without memory has no marker."""
    rows = [row("ddp", 8, 100), row("zero1", 6, 50), row("zero3", 4, 50), row("fsdp", None, 40), row("zero2", 5, None)]
    axes = drawn_of(rows)
    drawn = {str(line.get_label()): [(x, round(y)) for x, y in line.get_xydata().tolist()] for line in axes.lines}
    assert drawn == {
        "ddp": [(8, 100)], "zero1": [(6, 50)], "zero3": [(4, 50)], "not beaten in both": [(4, 50), (8, 100)],
    }  # fmt: skip
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("peak allocated memory (GiB)", "throughput (samples/s)")
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    assert axes.get_xlim()[1] > 8
    assert axes.get_ylim()[1] > 100


def test_a_gpu_and_a_cpu_in_one_panel_have_their_own_memory() -> None:
    cpu = Measurement(row("single", None, 10).row | {"device": "cpu", "memory_host_peak_bytes": 2 * GIB})
    assert drawn_of([row("ddp", 8, 100), cpu]).lines[-1].get_xydata().round().tolist() == [[2, 10], [8, 100]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_the_front_is_every_point_that_no_other_one_beats(points: list[tuple[float, float]]) -> None:
    def beaten(point: tuple[float, float]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] >= point[1] for other in points)

    assert front(points) == sorted({point for point in points if not beaten(point)})
