"""DeepSpeed's buckets, by hand."""

from __future__ import annotations

import pytest

from ddlbench.oracle.memory.zero_buckets import Bucket, Shards, interleaved, sliced

# Parameters of 6, 2, 8 and 4 numbers: 20, of which two ranks have 10 each. The third is cut after 2 of its numbers.
SHARDS = Shards((6, 8, 16, 20), 2)


def test_partitions_cut_parameters() -> None:
    assert SHARDS.size == 10
    assert [SHARDS.slices(which) for which in range(4)] == [[(0, 6)], [(0, 2)], [(0, 2), (1, 6)], [(1, 4)]]
    assert [SHARDS.touched(rank) for rank in range(2)] == [16, 12]


def test_a_rank_beyond_the_last_parameter_touches_nothing() -> None:
    assert [Shards((3,), 2).touched(rank) for rank in range(2)] == [3, 3]
    assert [Shards((2, 4), 4).touched(rank) for rank in range(4)] == [2, 2, 2, 2]


def test_pieces_of_one_rank_are_not_copied() -> None:
    copied = sliced(SHARDS, limit=20)
    assert copied([0, 1]) == 0
    assert copied([1, 2]) == 10, "a piece of 4 of the first rank, one of 6 of the second"
    assert copied([2]) == 8
    assert sliced(SHARDS, limit=1)([2]) == 0, "each piece is larger than a bucket and sent by itself"


def test_stage_3_copies_what_the_ranks_do_not_divide() -> None:
    copied = interleaved(Shards((6, 13), 2))
    assert (copied([0]), copied([1]), copied([0, 1])) == (0, 8, 14)


def test_a_gradient_larger_than_the_bucket_waits_outside() -> None:
    """Of 8 numbers where 5 fit. The next one's arrival reduces it: 8 beside, and 8 copied."""
    bucket = Bucket(5, SHARDS.numbers, lambda held: sum(map(SHARDS.numbers, held)))
    assert [bucket.arrives(3), bucket.arrives(2), bucket.beside] == [0, 4, 8]
    assert [bucket.arrives(1), bucket.beside] == [16, 0]


def test_room_for_what_a_rank_keeps_is_made_once() -> None:
    bucket = Bucket(5, SHARDS.numbers, lambda _: 0, lambda which: SHARDS.has(0, which), SHARDS.touched(0))
    assert [bucket.arrives(3), bucket.arrives(2)] == [0, 0], "the last is not its own"
    assert bucket.arrives(1) == 8 + 16, "the third, of which it has a part, is moved into the room while it is there"
    assert bucket.beside == 16


@pytest.mark.parametrize("ranks", [1, 3, 7, 20])
def test_slices_are_the_parameter(ranks: int) -> None:
    shards = Shards((6, 8, 16, 20), ranks)
    for which in range(4):
        assert sum(numbers for _, numbers in shards.slices(which)) == shards.numbers(which)
    assert shards.most_touched() == shards.touched(shards.fullest()) == max(map(shards.touched, range(ranks)))
    for rank in range(ranks):
        assert shards.touched(rank) == sum(shards.numbers(which) for which in range(4) if shards.has(rank, which))
