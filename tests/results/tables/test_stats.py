"""Intervals of medians; tests/report/test_invariants.py has their definition."""

from __future__ import annotations

import pytest

from ddlbench.results.tables.stats import median_interval


def test_thousands_of_values_have_an_interval_too():
    """As wide as the normal approximation, n / 2 -+ 0.98 sqrt(n). A sum of binomials for each pair would take hours."""
    result = median_interval([float(i) for i in range(20_000)])
    assert result is not None
    assert (result.low, result.high) == (pytest.approx(10_000 - 138.6, abs=2), pytest.approx(10_000 + 138.6, abs=2))
    assert result.coverage == pytest.approx(0.95, abs=0.002)
