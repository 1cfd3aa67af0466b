"""Which samples each replica sees, and when. Pure functions of (seed, epoch, data rank): no layout changes a sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddlbench.errors import UserError

Indices = NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The epoch's permutation of all training samples, [samples]. RandomState: its stream never changes with numpy."""
    return np.random.RandomState([seed % 2**32, seed >> 32, epoch]).permutation(samples).astype(np.int64, copy=False)


def training_steps(samples: int, global_batch: int, cap: int | None = None) -> int:
    """Full global batches in an epoch, at most `cap`; the incomplete last one is dropped. Raises UserError where the
    samples do not fill a single global batch."""
    full = samples // global_batch
    if not full:
        raise UserError(
            f"the data has {samples} training samples, fewer than one global batch of {global_batch}: "
            f"lower train.global_batch (or train.batch_per_gpu), or choose a larger data set"
        )
    return full if cap is None else min(full, cap)


def training_batches(order: Indices, replica_batch: int, data_rank: int, data_size: int) -> Indices:
    """Row i is this replica's slice of global batch i: [full global batches, replica_batch].

    A global batch is a contiguous cut of `order`, and data rank r takes the r-th contiguous slice of it.
    """
    steps = len(order) // (replica_batch * data_size)
    return order[: steps * replica_batch * data_size].reshape(steps, data_size, replica_batch)[:, data_rank]


def validation_batches(samples: int, replica_batch: int, data_rank: int, data_size: int) -> list[Indices]:
    """This replica's strided shard in batches of at most `replica_batch`, without padding.

    Every sample is in exactly one shard. The number of batches is the same on every replica, so the last may be
    short, or empty where the shard is one batch shorter than the longest.
    """
    shard = np.arange(data_rank, samples, data_size, dtype=np.int64)
    count = -(-samples // (replica_batch * data_size))
    return [shard[i * replica_batch : (i + 1) * replica_batch] for i in range(count)]
