"""The bands that errors of predictions give; see benchmarks/published.py."""

from __future__ import annotations

from benchmarks.published import ends


def test_bands_are_the_ranks_of_the_ratios() -> None:
    """39 ratios 0.81, 0.82, ..., 1.19: the 4th and the 36th end the band of 80 %, the 1st and the 39th that of 95 %."""
    assert ends([0.80 + 0.01 * k for k in range(1, 40)]) == ((0.84, 1.16), (0.81, 1.19))
    assert ends([1.1, 0.9]) == ((0.9, 1.1), (0.9, 1.1))
