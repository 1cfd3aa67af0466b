"""Ranks as threads of one process, each with a clock that only scripted work moves: every second of a row and of a
table is known before the run. The loop, the clock, the reduction, the record and the report are the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ddlbench.job import Batch, Place, Score
from ddlbench.measure import clock
from ddlbench.ranks import control

HANG_S = 20.0  # of real time: a rank that waits longer for the others ends the test


class World:
    """`size` ranks. A collective sets the clocks of all ranks to the latest one. While they run, it replaces
    `torch.distributed` in ranks/control.py and `time` in measure/clock.py.

    message_s: of one message; one after the other, a barrier has log2(size) of them, an all-reduce 2 (size - 1)
    """

    ReduceOp = dist.ReduceOp

    def __init__(self, size: int, message_s: float = 0.0) -> None:
        self.size, self.message_s = size, message_s
        self.seconds = [0.0] * size  # the clock of each rank
        self.values: list[Any] = [None] * size
        self.meeting = threading.Barrier(size, timeout=HANG_S)
        self.own = threading.local()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(control, "dist", self)
        patch.setattr(clock, "time", self)

    def perf_counter(self) -> float:
        return self.seconds[self.own.rank]

    def spend(self, seconds: float) -> None:
        """This rank works or waits for `seconds`."""
        self.seconds[self.own.rank] += seconds

    def set_timeout(self, _: object) -> None:
        """Nothing is late here."""

    def exchange(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank."""
        self.values[self.own.rank] = value
        self.meeting.wait()
        result, latest = list(self.values), max(self.seconds)
        self.meeting.wait()  # every rank has read: the next values may come
        self.seconds[self.own.rank] = latest
        return result

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return self.own.rank

    def get_world_size(self) -> int:
        return self.size

    def all_reduce(self, values: torch.Tensor) -> None:
        values.copy_(torch.stack(self.exchange(values.clone())).sum(0))
        self.spend(2 * (self.size - 1) * self.message_s)

    def barrier(self) -> None:
        self.exchange(None)
        self.spend((self.size - 1).bit_length() * self.message_s)

    def all_gather_object(self, outcomes: list[Any], value: Any) -> None:
        outcomes[:] = self.exchange(value)

    def broadcast_object_list(self, values: list[Any], src: int) -> None:
        values[:] = [self.exchange(values[0])[src]]

    def gather_object(self, value: Any, outcomes: list[Any] | None) -> None:
        everything = self.exchange(value)
        if outcomes is not None:
            outcomes[:] = everything

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` on every rank; what each returned, by rank. Raises what the rank that failed first raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.insert(0, error)
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        with pytest.MonkeyPatch.context() as patch:
            self.install(patch)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * HANG_S)
        if errors:
            raise errors[0]
        return results


@dataclass
class RankScript:
    """What one rank spends, in seconds of its clock.

    before: from the start of an epoch to the clock (workers start)
    wait, compute: [epoch][step], waiting for the batch and the step itself
    flush: [epoch], finishing what is in flight
    validation: for the validation batches of an epoch
    """

    wait: Sequence[Sequence[float]]
    compute: Sequence[Sequence[float]]
    flush: Sequence[float]
    before: float = 0.0
    validation: float = 0.0


@dataclass
class ScriptedFeed:
    """Batches that arrive with the delays of the script."""

    world: World
    script: RankScript
    replica_batch: int
    val_batch: Batch
    val_samples: int
    dropped_samples: int = 0
    val_unread: int = 0

    def __post_init__(self) -> None:
        self.steps_per_epoch = len(self.script.wait[0])

    def train(self, epoch: int) -> Iterator[Batch]:
        self.world.spend(self.script.before)
        return self._batches(self.script.wait[epoch])

    def _batches(self, waits: Sequence[float]) -> Iterator[Batch]:
        for seconds in waits:
            self.world.spend(seconds)
            zeros = torch.zeros(self.replica_batch)
            yield Batch(zeros, zeros, zeros == 0)

    def validation(self) -> Iterator[Batch]:
        self.world.spend(self.script.validation)
        yield self.val_batch

    def facts(self) -> dict[str, Any]:
        return {"bad_samples": {}}

    def close(self) -> None: ...


@dataclass
class ScriptedTrainer:
    """Steps with the durations of the script; nothing is trained. loss: of the n-th step of the run"""

    world: World
    script: RankScript
    place: Place
    loss: Callable[[int], float]
    optimizer: Any = field(
        default_factory=lambda: cast(Any, SimpleNamespace(param_groups=[{"lr": 0.0, "params": list[Any]()}]))
    )
    updates: int = 0
    flushed: int = 0

    def step(self, batch: Batch | None) -> torch.Tensor | None:
        epoch, step = divmod(self.updates, len(self.script.compute[0]))
        self.world.spend(self.script.compute[epoch][step])
        self.updates += 1
        return torch.tensor(self.loss(self.updates - 1)) if self.place.reports else None

    def evaluate(self, batch: Batch | None, score: Score) -> None:
        assert batch is not None
        if self.place.reports:
            score(batch.inputs, batch)

    def flush(self) -> None:
        self.world.spend(self.script.flush[self.flushed])
        self.flushed += 1

    def facts(self) -> dict[str, Any]:
        return {}
