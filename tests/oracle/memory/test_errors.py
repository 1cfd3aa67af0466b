"""The error of a formula decides whether it is known that a job fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlbench.config.choices import choices
from ddlbench.oracle.bands import WORST_ERRORS, fits, worst_error

PAGE = Path(__file__).parents[3] / "docs" / "oracle.md"


@pytest.mark.parametrize(
    ("capacity", "expected"), [(126.0, True), (124.0, None), (100.0, None), (84.0, None), (83.0, False), (None, None)]
)
def test_what_lies_within_the_error_is_unknown(capacity: float | None, expected: bool | None) -> None:
    """100 bytes with an error of 20 %: between 100 / 1.2 = 83.3 and 100 / 0.8 = 125."""
    assert fits(100.0, 0.2, capacity) is expected


def test_an_error_of_more_than_all_bytes_never_says_that_they_fit() -> None:
    """100 bytes with an error of 120 %: 100 / 2.2 = 45.5 at least, and no most."""
    assert (fits(100.0, 1.2, 1e6), fits(100.0, 1.2, 46.0), fits(100.0, 1.2, 45.0)) == (None, None, False)


def test_exact_bytes_fit_or_do_not() -> None:
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
