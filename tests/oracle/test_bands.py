"""Which band a prediction has; the error of a memory formula decides whether it is known that a job fits."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.published import ends
from ddlbench.config.choices import choices
from ddlbench.oracle.bands import BANDS, LAYOUTS, WORST_ERRORS, band, fits, worst_error
from ddlbench.results.rows import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "oracle.md"


@pytest.mark.parametrize(
    ("framework", "nodes", "device", "learned", "name"),
    [
        ("ddp", 1, "cuda", False, "replicas"),
        ("ddp", 2, "cuda", False, "replicas"),
        ("zero3", 2, "cuda", False, "replicas"),
        ("ddp", 1, "cuda", True, "learned"),
        ("ddp", 2, "cuda", True, "learned"),
        ("gpipe", 1, "cuda", False, "layout"),
        ("gpipe", 2, "cuda", False, "layout on several nodes"),
        ("gpipe", 1, "cuda", True, "layout"),
        ("gpipe", 2, "cuda", True, "layout on several nodes"),
        ("ddp", 1, "cpu", False, "cpu"),
        ("ddp", 2, "cpu", True, "cpu"),
        ("gpipe", 2, "cpu", False, "cpu"),
        ("horovod", 2, "cpu", False, "horovod on cpu"),
        ("horovod", 2, "cuda", False, "replicas"),
    ],
)
def test_the_class_of_a_prediction(framework: str, nodes: int, device: str, learned: bool, name: str) -> None:
    low_80, high_80, low_95, high_95 = band(1.0, framework, nodes, device, learned).values()
    assert ((low_80, high_80), (low_95, high_95)) == BANDS[name]


def test_classes_differ_and_their_bands_lie_around_each_other() -> None:
    assert len(set(BANDS.values())) == len(BANDS)
    for (low_80, high_80), (low_95, high_95) in BANDS.values():
        assert low_95 <= low_80 <= high_80 <= high_95


def test_the_bands_of_cpus_are_those_of_the_miniatures_of_the_papers() -> None:
    tables = sorted((Path(__file__).parents[2] / "results" / "papers").glob("*/tables/scaling.csv"))
    rows = pd.concat([pd.read_csv(table) for table in tables])
    rows = rows[(rows.gpus > 1) & rows.predicted_error.notna()]
    horovod = rows.framework == "horovod"
    for name, count, of_class in (("cpu", 60, rows[~horovod]), ("horovod on cpu", 6, rows[horovod])):
        assert len(of_class) == count
        assert ends([1 / (1 + error) for error in of_class.predicted_error]) == BANDS[name]


def test_only_frameworks_of_whole_replicas_are_no_layouts() -> None:
    replicas = {"ddp", "deepspeed", "fsdp", "horovod", "local_sgd", "parameter_server", "single"}
    zero = {f"zero{stage}" for stage in range(4)}
    assert set(choices("framework")) - set(LAYOUTS) == replicas | zero


def test_ends_are_factors_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BANDS, "replicas", ((0.75, 1.25), (0.5, 2.0)))
    assert band(4.0, "ddp", 1) == {
        "low_80_s": 3.0, "high_80_s": 5.0, "low_95_s": 2.0, "high_95_s": 8.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capacity", "expected"), [(126.0, True), (124.0, None), (100.0, None), (84.0, None), (83.0, False), (None, None)]
)
def test_what_lies_within_the_error_is_unknown(capacity: float | None, expected: bool | None) -> None:
    """100 bytes with an error of 20 %: between 100 / 1.2 = 83.3 and 100 / 0.8 = 125."""
    assert fits(100.0, 0.2, capacity) is expected


def test_an_error_of_more_than_all_bytes_never_says_that_they_fit() -> None:
    """100 bytes with an error of 120 %: 100 / 2.2 = 45.5 at least, and no most. Exact bytes fit, or they do not fit."""
    assert (fits(100.0, 1.2, 1e6), fits(100.0, 1.2, 46.0), fits(100.0, 1.2, 45.0)) == (None, None, False)
    assert (fits(100.0, 0.0, 100.0), fits(100.0, 0.0, 99.0)) == (True, False)


def test_every_framework_has_an_error_and_others_the_largest() -> None:
    assert set(WORST_ERRORS) == set(choices("framework")) - {"deepspeed"}  # which is zero0 to zero3, by its stage
    assert worst_error("unheard_of") == max(WORST_ERRORS.values())


def test_the_page_states_the_errors() -> None:
    """Each row of the table: names of frameworks, what is added, the error."""
    section = PAGE.read_text().partition("### Memory\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.endswith(" % |")]
    stated = {name: row[-1] for row in rows for name in row[0].replace("`", "").split(", ")}
    assert stated == {name: f"{100 * error:.0f} %" for name, error in WORST_ERRORS.items()}


def test_every_framework_is_in_one_family() -> None:
    assert sorted(chain.from_iterable(FAMILIES.values())) == sorted(choices("framework"))
