"""Dimensions of a mesh; each number worked out by hand."""

from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.frameworks.shared.layout import divisors, fill, nearest_mesh


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_the_free_dimension_takes_the_ranks_that_are_left() -> None:
    assert fill(12, {"dp": 3, "tp": None}, free="tp") == 4
    assert fill(12, {"dp": 3, "tp": 4}, free="tp") == 4
    assert fill(12, {"dp": 3, "tp": 2, "pp": None}, free="pp") == 2


def test_what_does_not_fill_the_ranks_comes_with_the_nearest_mesh() -> None:
    with pytest.raises(UserError, match=r"^framework.dp=2 x framework.tp=3 does not fill 4 .*: choose .*dp=2 .*tp=2$"):
        fill(4, {"dp": 2, "tp": 3}, free="tp")
    with pytest.raises(UserError, match=r"^framework.dp=5 x framework.tp=null does not fill 8 .* .*dp=4 .*tp=2$"):
        fill(8, {"dp": 5, "tp": None}, free="tp")
    assert nearest_mesh(8, [2, 3, 3]) == (2, 2, 2)
    assert nearest_mesh(6, [2, None]) == (2, 3)
