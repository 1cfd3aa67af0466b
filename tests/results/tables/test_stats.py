"""Medians, their intervals, speedup and efficiency against numbers worked out by hand."""

from __future__ import annotations

import pytest

from ddlbench.results.tables.stats import Interval, efficiency, median_interval, speedup


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, None),
        (5, None),  # 1 - 2 / 2^5 = 93.75 % even for the whole range
        (6, Interval(1, 6, 1 - 2 / 2**6)),  # 96.9 %: the whole range
        (8, Interval(1, 8, 1 - 2 * 1 / 2**8)),  # [x(2), x(7)] covers 1 - 2 (1 + 8) / 256 = 93.0 %: not enough
        (9, Interval(2, 8, 1 - 2 * (1 + 9) / 2**9)),  # 96.1 %
        (12, Interval(3, 10, 1 - 2 * (1 + 12 + 66) / 2**12)),  # 96.1 %; the next pair 85.4 %
    ],
)
def test_an_interval_is_the_narrowest_that_covers_enough_from_six_values_on(n, expected):
    assert median_interval([float(i) for i in range(n, 0, -1)]) == expected


def test_speedup_and_efficiency_start_from_the_base():
    # 120 s on 2 GPUs, 40 s on 8: three times as fast on four times the GPUs
    assert speedup(120.0, 40.0) == 3.0
    assert efficiency(120.0, 2, 40.0, 8) == 0.75
    assert efficiency(120.0, 2, 120.0, 2) == 1.0


def test_thousands_of_values_have_an_interval_too():
    """As wide as the normal approximation, n / 2 -+ 0.98 sqrt(n). A sum of binomials for each pair would take hours."""
    result = median_interval([float(i) for i in range(20_000)])
    assert result is not None
    assert (result.low, result.high) == (pytest.approx(10_000 - 138.6, abs=2), pytest.approx(10_000 + 138.6, abs=2))
    assert result.coverage == pytest.approx(0.95, abs=0.002)
