"""Peak memory of a rank with shards, by hand: the blocks of docs/oracle.md with 8 and 4 bytes of weights."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.oracle.memory.passes import batch_bytes
from ddlbench.oracle.memory.shards import Gathered, fsdp, zero3
from ddlbench.oracle.setting import Memory
from tests.oracle.made import A, B, made

SETTING = made(4, [replace(A, parameters=(2,)), replace(B, parameters=(1,))], batch=4)
TWO = made(4, [replace(A, parameters=(2,)), replace(B, parameters=(1,))], batch=8, micro_batch=1)
BATCH = batch_bytes(SETTING.job, 1)


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
