"""Energy counters of a processor as the kernel shows them, in a folder of the test."""

from __future__ import annotations

from pathlib import Path


def zone(folder: Path, number: str, name: str, joules: float, range_j: float = 1000.0) -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text(f"{int(range_j * 1e6)}\n")
    set_energy(made, joules)
    return made


def set_energy(made: Path, joules: float) -> None:
    (made / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
