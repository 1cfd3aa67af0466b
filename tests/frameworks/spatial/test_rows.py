"""Parts of images: with the rows of all parts, every row of a layer's output can be computed, once."""

from __future__ import annotations

from itertools import product

import pytest

from ddlbench.frameworks.spatial.rows import Window
from ddlbench.frameworks.tensor.collectives import Part

WINDOWS = {"3x3": (3, 1, 1), "strided": (3, 2, 1), "1x1 strided": (1, 2, 0), "stem": (7, 2, 3), "halves": (2, 2, 0)}


@pytest.mark.parametrize("name", WINDOWS)
def test_lent_rows_are_what_the_windows_of_all_parts_reach(name: str) -> None:
    """Heights that divide and others, cut into 2 to 5 parts, compared with the rows of each window one by one."""
    kernel, stride, padding = WINDOWS[name]
    for height, size in product(range(14, 40), range(2, 6)):
        window = Window(height, kernel, stride, padding)
        parts = [Part(None, rank, size) for rank in range(size)]
        for user in parts:
            first, count = user.span(window.output)
            reached = {
                row
                for output in range(first, first + count)
                for row in range(output * stride - padding, output * stride - padding + kernel)
            }
            got: list[int] = []
            for owner in parts:
                begin, rows = owner.span(height)[0], window.lent(owner)[user.rank]
                assert window.taken(user)[owner.rank] == rows.stop - rows.start <= owner.span(height)[1]
                got += range(begin + rows.start, begin + rows.stop)
            # With a stride windows may skip rows between two that they reach.
            every = range(max(0, min(reached)), min(height, max(reached) + 1))
            assert {row for row in reached if 0 <= row < height} <= set(every)
            assert got == [*every], (height, size)


def test_neighbours_send_a_row_of_a_3x3_convolution() -> None:
    """Parts of 8 rows: the first one sends its last row, the others one in each direction."""
    window = Window(24, 3, 1, 1)
    lent = [[(rows.start, rows.stop) for rows in window.lent(Part(None, rank, 3))] for rank in range(3)]
    assert [lent[0][1], lent[1][0], lent[1][2], lent[2][1]] == [(7, 8), (0, 1), (7, 8), (0, 1)]
    assert [window.taken(Part(None, rank, 3)) for rank in range(3)] == [[8, 1, 0], [1, 8, 1], [0, 1, 8]]


def test_pooling_by_halves_needs_a_neighbour_only_where_a_part_is_odd() -> None:
    assert Window(24, 2, 2).taken(Part(None, 0, 2)) == [12, 0]
    assert Window(26, 2, 2).taken(Part(None, 0, 2)) == [13, 1]
