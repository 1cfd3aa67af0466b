"""Which band a prediction has."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.published import ends
from ddlbench.config.choices import choices
from ddlbench.oracle.bands import BANDS, LAYOUTS, around, band


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
    ],
)
def test_the_class_of_a_prediction(framework: str, nodes: int, device: str, learned: bool, name: str) -> None:
    assert band(framework, nodes, device, learned) == BANDS[name]


def test_classes_differ_and_their_bands_lie_around_each_other() -> None:
    assert len(set(BANDS.values())) == len(BANDS)
    for (low_80, high_80), (low_95, high_95) in BANDS.values():
        assert low_95 <= low_80 <= high_80 <= high_95


def test_the_band_of_cpus_is_that_of_the_miniatures_of_the_papers() -> None:
    tables = sorted((Path(__file__).parents[2] / "results" / "papers").glob("*/tables/scaling.csv"))
    rows = pd.concat([pd.read_csv(table) for table in tables])
    rows = rows[(rows.gpus > 1) & (rows.framework != "horovod") & rows.predicted_error.notna()]
    assert len(rows) == 60
    assert ends([1 / (1 + error) for error in rows.predicted_error]) == BANDS["cpu"]


def test_every_layout_has_the_band_of_layouts() -> None:
    for nodes, name in ((1, "layout"), (2, "layout on several nodes"), (128, "layout on several nodes")):
        assert {band(layout, nodes) for layout in LAYOUTS} == {BANDS[name]}


def test_only_frameworks_of_whole_replicas_are_no_layouts() -> None:
    replicas = {"ddp", "deepspeed", "fsdp", "horovod", "local_sgd", "parameter_server", "single"}
    zero = {f"zero{stage}" for stage in range(4)}
    assert set(choices("framework")) - set(LAYOUTS) == replicas | zero


def test_ends_are_factors_of_the_seconds() -> None:
    assert around(4.0, ((0.75, 1.25), (0.5, 2.0))) == {
        "low_80_s": 3.0, "high_80_s": 5.0, "low_95_s": 2.0, "high_95_s": 8.0,
    }  # fmt: skip
