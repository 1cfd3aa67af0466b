"""The harness's own collectives, for its numbers: over gloo on the CPU, also if the framework uses another library."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
NO_LIMIT = timedelta(days=7)


def single_process() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def barrier() -> None:
    """Wait for all N ranks: log2(N) rounds of messages (gloo's barrier.cc). An all-reduce would pass a message around a
    ring, 2 (N - 1) times. Nothing is queued on a GPU: torch's barrier uses the CPU's backend where a group has one."""
    if not single_process():
        dist.barrier()


def wait_for(ranks: Sequence[int], what: str) -> None:
    """Every rank waits, without a timeout, until these ranks have called this. If a rank exits or is stopped, its
    heartbeat stops, and the run ends."""
    if single_process():
        return
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if dist.get_rank() in ranks:
        store.set(f"{what}/{dist.get_rank()}", "done")
    store.wait([f"{what}/{rank}" for rank in ranks], NO_LIMIT)


@contextmanager
def without_timeout(usual: timedelta) -> Generator[None]:
    """Within it a collective of all ranks waits for days, as `wait_for`, and the end of a rank ends the run. usual: the
    timeout after it"""
    # The function's name in newer versions of torch, and in older ones.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # pyright: ignore
    if single_process():
        yield
    else:
        change(NO_LIMIT)
        yield
        change(usual)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, on the CPU. Waits for the device."""
    values = values.detach().to("cpu", copy=True)
    if not single_process():
        dist.all_reduce(values)
    return values


class AsyncReduction:
    """A sum over all ranks (or what `op` says) of numbers on the CPU. Every rank starts it, and waits for the others
    only when it asks for the result."""

    def __init__(self, numbers: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.numbers = numbers
        self.work = None if single_process() else dist.all_reduce(numbers, op, async_op=True)

    def result(self) -> list[Any]:
        """The numbers, as `Tensor.tolist` gives them."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.numbers.tolist()


def all_gather(value: Any) -> list[Any]:
    """The value of each rank, by rank, on every rank (all-gather). For a few numbers, not for tables."""
    if single_process():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank (broadcast)."""
    values = [value]
    if not single_process():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def once_per_node(local_rank: int, work: Callable[[], T], what: str) -> list[T]:
    """Local rank 0 of each node does the work, however long it takes, while all ranks wait; every rank gets the results
    of all nodes. what: a name for this wait, used once"""
    works = local_rank == 0
    workers = [rank for rank, worker in enumerate(all_gather(works)) if worker]
    result = work() if works else None
    wait_for(workers, what)
    return [result for result in all_gather(result) if result is not None]


def gather_to_rank0(value: Any) -> list[Any]:
    """The value of each rank, by rank, on rank 0; empty on the others (gather)."""
    if single_process():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []
