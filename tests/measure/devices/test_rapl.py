from __future__ import annotations

from pathlib import Path

import pytest

from ddlbench.measure.devices.rapl import Rapl
from tests.measure.devices.rapl import set_energy, zone


def test_energy_is_the_sum_over_packages_without_parts_and_platform(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, "0", "package-0", 10),
        zone(tmp_path, "1", "package-1", 500),
        zone(tmp_path, "0:0", "core", 7),
        zone(tmp_path, "0:1", "dram", 3),
        zone(tmp_path, "2", "psys", 900),
    ]
    meter = Rapl.open(tmp_path)
    assert meter
    assert meter.joules() == 0
    for each, joules in zip(zones, (15, 520, 100, 100, 950), strict=True):
        set_energy(each, joules)
    assert meter.joules() == 5 + 20
    assert meter.joules() == 25  # since it was opened


def test_a_counter_that_begins_again_is_added_up(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 990, range_j=1000)
    meter = Rapl.open(tmp_path)
    assert meter
    set_energy(package, 4)
    assert meter.joules() == 14
    set_energy(package, 3)  # the counter began again
    assert meter.joules() == 14 + 999


@pytest.mark.parametrize("broken", ["none", "unreadable", "garbled"])
def test_counters_that_cannot_be_read_give_no_meter(tmp_path: Path, broken: str) -> None:
    if broken != "none":
        zone(tmp_path, "0", "package-0", 10)
        second = zone(tmp_path, "1", "package-1", 10)  # one of two packages would be half the energy
        (second / "energy_uj").unlink()
        if broken == "garbled":
            (second / "energy_uj").write_text("no number")
        else:
            (second / "energy_uj").mkdir()  # an OSError for root, too
    assert Rapl.open(tmp_path) is None
