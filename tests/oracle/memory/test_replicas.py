"""Peak memory of a rank by hand: the blocks of docs/oracle.md with 8 and 4 bytes of weights."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.oracle.memory.passes import batch_bytes
from ddlbench.oracle.memory.replicas import Gathered, fsdp, replica, zero, zero3
from ddlbench.oracle.setting import Memory
from tests.oracle.made import A, B, made

SETTING = made(4, [replace(A, tensor_sizes=(2,)), replace(B, tensor_sizes=(1,))], batch=4)
TWO = made(4, [replace(A, tensor_sizes=(2,)), replace(B, tensor_sizes=(1,))], batch=8, micro_batch=1)
BATCH = batch_bytes(SETTING.job, 1)


def test_gradients_arrive_in_one_micro_batch() -> None:
    """The backward pass of B; with two micro batches all 12 bytes are there, and two batches."""
    assert replica(SETTING, SETTING.counts, 4) == Memory(12, 0, 12, 40, BATCH)
    assert replica(TWO, TWO.counts, 4) == Memory(12, 12, 12, 36, 2 * BATCH)


def test_buckets_hold_all_gradients_from_step_to_step() -> None:
    assert replica(SETTING, SETTING.counts, 4, bucketed=True) == Memory(12, 12, 12, 36, BATCH)


def test_gradients_of_several_micro_batches_wait_beside_the_buckets() -> None:
    assert replica(TWO, TWO.counts, 4, bucketed=True) == Memory(12, 12, 12, 36, 12 + 2 * BATCH)


def test_gradients_can_be_copied_to_be_reduced() -> None:
    assert replica(SETTING, SETTING.counts, 4, reduced=50) == Memory(12, 12, 12, 50, BATCH)


def test_the_update_copies_the_largest_tensor() -> None:
    """1,000 numbers and momentum: 4,000 bytes are added to the weight decay."""
    large = made(4, [replace(A, tensor_sizes=(1000,)), B], batch=4)
    assert replica(large, large.counts, 4) == Memory(4000, 4000, 4000, 4000, BATCH)


def test_zero_1_reduces_after_the_backward_pass() -> None:
    """With a bucket of 100 bytes the backward pass of B is the peak. With one of 1 byte and larger tensors, the copy of
    the largest one for its reduction is: 4,000 of gradients beside 1,000 of the rank's share."""
    assert zero(SETTING, 1, 25, overlaps=False, casts=False) == Memory(12, 0, 6, 40, 100 + BATCH)
    large = made(4, [replace(A, tensor_sizes=(1000,)), replace(B, tensor_sizes=())], batch=4)
    assert zero(large, 1, 0.25, overlaps=False, casts=False) == Memory(4000, 4000, 2000, 1000 + 4000, 1 + BATCH)


def test_zero_2_reduces_during_the_backward_pass() -> None:
    """Its share of 3 bytes, and a copy of 8 for the tensor that is larger than the bucket; with two micro batches the
    sum and the newest gradients. A bucket that is never full is copied at the end."""
    assert zero(SETTING, 2, 1.5, overlaps=False, casts=False) == Memory(12, 3, 6, 36 + 8, 6 + BATCH)
    assert zero(TWO, 2, 1.5, overlaps=False, casts=False) == Memory(12, 6, 6, 36 + 8, 6 + 2 * BATCH)
    assert zero(SETTING, 2, 3, overlaps=True, casts=False) == Memory(12, 3, 6, 36, 24 + BATCH)


def test_fsdp_has_the_weights_of_the_block_that_runs() -> None:
    """Backward pass of B: 10 + 30, its 4 bytes of weights, and 8 of the next block."""
    assert fsdp(SETTING, 4, Gathered(4, [8, 4], 0)) == Memory(3, 0, 3, 40 + 12, BATCH)


def test_a_block_that_stays_gathered_is_not_gathered_again() -> None:
    assert fsdp(SETTING, 4, Gathered(4, [0, 4], 8)) == Memory(3, 0, 3, 40 + 4, 8 + BATCH)


def test_fsdp_adds_up_complete_gradients() -> None:
    assert fsdp(TWO, 4, Gathered(4, [8, 4], 0)) == Memory(3, 12, 3, 36 + 12, 2 * BATCH)


def test_zero_3_keeps_gathered_weights_and_a_bucket() -> None:
    """12 bytes stay gathered while B runs; a copy of 8 bytes is reduced where the bucket is smaller than the
    gradients."""
    gathered = Gathered(4, [0, 0], 12)
    assert zero3(SETTING, gathered, bucket=100, persistent=5) == Memory(8, 3, 6, 36 + 12, 100 + BATCH)
    assert zero3(SETTING, gathered, bucket=6, persistent=0) == Memory(3, 3, 6, 36 + 12 + 8, 6 + BATCH)
