"""Dimensions of a mesh; each number worked out by hand."""

from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.frameworks.shared.layout import Layout, fill, nearest_mesh


def test_the_free_dimension_takes_the_ranks_that_are_left() -> None:
    assert fill(12, dp=3, tp=None) == fill(12, dp=None, tp=4) == fill(12, dp=3, tp=4) == {"dp": 3, "tp": 4}
    assert fill(12, dp=3, tp=2, pp=None) == fill(12, dp=None, tp=2, pp=2) == {"dp": 3, "tp": 2, "pp": 2}


def test_a_mesh_that_does_not_fill_the_ranks_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"^framework.dp=2 x framework.tp=3 does not fill 4 .*: choose .*dp=2 .*tp=2$"):
        fill(4, dp=2, tp=3)
    with pytest.raises(UserError, match=r"^framework.dp=5 x framework.tp=null does not fill 8 .* .*dp=4 .*tp=2$"):
        fill(8, dp=5, tp=None)
    with pytest.raises(UserError, match=r"^framework.dp=null x framework.tp=4 does not fill 6 .* .*dp=2 .*tp=3$"):
        fill(6, dp=None, tp=4)
    with pytest.raises(UserError, match=r"null x framework.pp=null has more than one free dimension for 8 ranks: "):
        fill(8, dp=None, pp=None)
    assert nearest_mesh(8, [2, 3, 3]) == (2, 2, 2)
    assert nearest_mesh(6, [2, None]) == (2, 3)
    assert nearest_mesh(1024, [1, 8, 8]) == (16, 8, 8)  # not 128 stages, which is as near
    assert nearest_mesh(12, [1, 3]) == (4, 3)  # in floating point (3, 4) is nearer by one digit


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    layout = Layout(dp=2, tp=3, pp=4)
    kinds = [layout.groups("dp"), layout.groups("tp"), layout.groups("pp"), layout.groups("pp", "tp")]
    for groups, size in zip(kinds, (2, 3, 4, 12), strict=True):
        assert {len(ranks) for ranks in groups} == {size}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(24))
    for rank in range(24):
        dp, tp, pp = layout.position(rank)
        assert (pp * layout.dp + dp) * layout.tp + tp == rank


def test_parts_are_neighbours_and_stages_are_furthest_apart() -> None:
    layout = Layout(dp=2, tp=2, pp=3)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert layout.groups("pp") == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert layout.groups("pp", "tp") == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
