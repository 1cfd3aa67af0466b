from __future__ import annotations

import pytest

from ddlbench.oracle.strategies.data_parallel import Gradient, Sharded, buckets, queue, sharded_step


def second_a_byte(size: float) -> float:
    return size


def test_buckets_close_when_they_are_full() -> None:
    """First bucket from 2 bytes on, then from 4; gradients in reverse order of blocks."""
    sizes, backward = [[1], [9, 3], [], [1, 1]], [7.0, 2.0, 0.5, 1.0]
    assert buckets(sizes, backward, first=2, cap=4) == [Gradient(2, 1.0), Gradient(12, 3.5), Gradient(1, 10.5)]
    assert buckets([[], [3]], [7.0, 1.0], first=4) == [Gradient(3, 1.0)]


def test_messages_wait_for_their_gradients_and_for_each_other() -> None:
    """Ready at 1 and 2, 3 s and 1 s: 1 to 4, 4 to 5."""
    assert queue([Gradient(3, 1.0), Gradient(1, 2.0)], second_a_byte) == 5.0
    assert queue([Gradient(3, 1.0), Gradient(1, 9.0)], second_a_byte) == 10.0


@pytest.mark.parametrize(
    ("blocks", "seconds"),
    [
        ([Sharded(1, 2, 0, 0, 0)] * 3, 9),  # only computing
        # gather 1 | forward 4 while the second is gathered | forward 4 | backward 8 | backward 8 | reduce 1
        ([Sharded(4, 8, 1, 1, 1), Sharded(4, 8, 1, 0, 1)], 1 + 4 + 4 + 8 + 8 + 1),
        ([Sharded(1, 0, 10, 0, 0)] * 3, 31),  # gathers of 10 s one after the other, the last forward pass after them
        # Forward until 3. Backward until 4, 5 and 6; reductions of 10 s from 4 on, one after the other: until 34.
        ([Sharded(1, 1, 0, 0, 10)] * 3, 34),
        # Forward until 3. The link: gathers 3 to 5 and 5 to 7 (the second one beside the first backward pass, 5 to 6),
        # reduction 7 to 17 beside the second pass (7 to 8), gather 17 to 19, reduction 19 to 29 beside the third pass
        # (19 to 20), reduction 29 to 39.
        ([Sharded(1, 1, 0, 2, 10)] * 3, 39),
    ],
)
def test_gathers_and_reductions_of_shards_share_the_link(blocks: list[Sharded], seconds: float) -> None:
    assert sharded_step(blocks) == pytest.approx(seconds)
