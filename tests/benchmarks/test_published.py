"""The bands that errors of predictions give; see benchmarks/published.py."""

from __future__ import annotations

from benchmarks.published import CHOSEN, ends, with_constants
from ddlbench.oracle.machine.machine import load, with_overlap


def test_bands_are_the_ranks_of_the_ratios() -> None:
    """39 ratios 0.81, 0.82, ..., 1.19: the 4th and the 36th end the band of 80 %, the 1st and the 39th that of 95 %."""
    assert ends([0.80 + 0.01 * k for k in range(1, 40)]) == ((0.84, 1.16), (0.81, 1.19))
    assert ends([1.1, 0.9]) == ((0.9, 1.1), (0.9, 1.1))


def test_constants_hide_nothing_where_a_library_reduces_after_the_backward_pass() -> None:
    machine = load("h100")
    assert with_constants(machine, CHOSEN).hidden_cost_with(8) == CHOSEN.hidden_cost
    assert with_constants(with_overlap(machine, False), CHOSEN).hidden_cost_with(8) == 1.0
