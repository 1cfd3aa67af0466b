"""Partitions computed by hand; see data/sampler.py."""

from __future__ import annotations

import numpy as np
import pytest

from ddlbench.data.sampler import epoch_order, training_batches, training_steps, validation_batches
from ddlbench.errors import UserError


def test_epoch_order_is_a_pinned_permutation():
    # numpy promises that RandomState's stream never changes: a run of today can be repeated in ten years.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [2, 6, 0, 4, 1, 3, 5, 7]
    assert sorted(epoch_order(1000, seed=3, epoch=7)) == list(range(1000))


def test_epochs_and_seeds_give_different_orders():
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1, 2**32, 2**32 + 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 8


@pytest.mark.parametrize(
    ("data_size", "rank", "expected"),
    [
        (1, 0, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]),
        (2, 0, [[0, 1, 2, 3, 4, 5]]),
        (2, 1, [[6, 7, 8, 9, 10, 11]]),
        (3, 1, [[4, 5, 6, 7]]),
        (4, 3, [[9, 10, 11]]),
    ],
)
def test_a_replica_takes_its_contiguous_slice_of_each_global_batch(data_size, rank, expected):
    assert training_batches(np.arange(14), 12 // data_size, rank, data_size).tolist() == expected


def test_training_slices_of_several_global_batches():
    order = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    assert training_batches(order, 2, 0, 2).tolist() == [[9, 8], [5, 4]]
    assert training_batches(order, 2, 1, 2).tolist() == [[7, 6], [3, 2]]  # 1 and 0: the dropped last global batch


@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
def test_every_training_sample_once_save_the_dropped(data_size):
    order = epoch_order(53, seed=1, epoch=2)
    slices = [training_batches(order, 4, rank, data_size) for rank in range(data_size)]
    together = np.concatenate(slices, axis=1)  # [steps, global batch]: global batches in their order
    steps = 53 // (4 * data_size)
    assert together.ravel().tolist() == order[: steps * 4 * data_size].tolist()


def test_training_steps():
    assert training_steps(53, 12) == 4
    assert training_steps(53, 12, cap=3) == 3
    assert training_steps(53, 12, cap=9) == 4
    with pytest.raises(UserError, match=r"53 training samples.*global batch of 54.*train.global_batch"):
        training_steps(53, 54)


def test_validation_shards_by_hand():
    def lists(rank, size):
        return [batch.tolist() for batch in validation_batches(7, 2, rank, size)]

    assert lists(0, 1) == [[0, 1], [2, 3], [4, 5], [6]]
    assert lists(0, 2) == [[0, 2], [4, 6]]
    assert lists(1, 2) == [[1, 3], [5]]
    assert lists(0, 3) == [[0, 3], [6]]
    assert lists(1, 3) == [[1, 4], []]
    assert lists(2, 3) == [[2, 5], []]
    assert [len(lists(rank, 4)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 11, 12, 13])
def test_every_validation_sample_exactly_once_in_equal_steps(samples, data_size):
    shards = [validation_batches(samples, 3, rank, data_size) for rank in range(data_size)]
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(int(i) for shard in shards for batch in shard for i in batch) == list(range(samples))
