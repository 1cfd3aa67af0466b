"""Seconds of a pipeline schedule: the order of the passes on each rank, and a simulation of when each pass starts.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved (Narayanan et al. 2021), zero bubble (Qi et al.
2023). With p equal stages, m micro batches and free messages a schedule takes (m + p - 1) (F + B).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

# Forward; backward; zero bubble's two backward passes, of inputs and of weights. The last is not in `order`: it runs
# while a rank would otherwise wait.
F, B, INPUTS, WEIGHTS = "F", "B", "I", "W"
Op = tuple[str, int, int]  # kind, stage, micro batch


class Timed(NamedTuple):
    """A pass with its begin and end in seconds after the begin of the schedule."""

    kind: str
    stage: int
    micro: int
    begin: float
    end: float


@dataclass(frozen=True)
class Stages:
    """Seconds of a micro batch in each stage: forward, backward, and sending to the next stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: tuple[float, ...]

    @property
    def busy(self) -> list[float]:
        """Seconds of one micro batch, by stage."""
        return [ahead + back for ahead, back in zip(self.forward, self.backward, strict=True)]


def seconds(schedule: str, stages: Stages, ranks: int, micro_batches: int) -> float:
    """Seconds of all micro batches. Stage i is on rank i % ranks.

    In a long GPipe or 1F1B each further `ranks` micro batches take as long as those before, so only the first ones are
    simulated. A single one may take longer: with messages 1F1B waits once in so many micro batches.
    """
    steady = 8 * len(stages.forward) + 2
    if schedule not in ("gpipe", "1f1b") or micro_batches <= steady:
        return simulate(schedule, stages, ranks, micro_batches)[-1].end
    periods, rest = divmod(micro_batches - steady, ranks)
    before, there = (simulate(schedule, stages, ranks, steady + rest + more)[-1].end for more in (-ranks, 0))
    return there + periods * (there - before)


def simulate(
    schedule: str, stages: Stages, ranks: int, micro_batches: int, slower: Callable[[int], float] = lambda _: 1.0
) -> list[Timed]:
    """Run the passes of every rank in their order; each starts as soon as its input is ready. Returns the passes in the
    order of their ends.

    slower: of ranks that share cores: while k of them compute at once, each takes slower(k) times as long
    """
    count, now = len(stages.forward), 0.0
    passes, done = list[Timed](), dict[Op, float]()
    orders = [deque(order(schedule, rank, ranks, count, micro_batches)) for rank in range(ranks)]
    weights = [deque[Op]() for _ in range(ranks)]  # gradients of weights that wait
    left: dict[int, float] = {}  # seconds of work left, of each rank that computes
    doing: dict[int, tuple[Op, float]] = {}  # with its begin
    while left or any(orders) or any(weights):
        arrivals: list[float] = []  # of the inputs that idle ranks wait for, if known
        for rank, todo in enumerate(orders):
            if rank in left:
                continue
            arrival = _ready(todo[0], done, stages, count) if todo else None
            arrived = arrival is not None and arrival <= now + 1e-12
            if arrived or weights[rank]:
                op = (todo if arrived else weights[rank]).popleft()
                kind, stage, _ = op
                took = stages.forward[stage] if kind == F else stages.backward[stage]
                doing[rank] = op, now
                left[rank] = took / 2 if kind in (INPUTS, WEIGHTS) else took
            elif arrival is not None:
                arrivals.append(arrival)
        rate = slower(len(left)) if left else 1.0
        events = [arrival - now for arrival in arrivals] + [rest * rate for rest in left.values()]
        assert events, "the schedule waits for itself"
        passed = min(events)
        now += passed
        for rank in list(left):
            left[rank] -= passed / rate
            if left[rank] <= 1e-12 * rate:
                del left[rank]
                (kind, stage, micro), begin = doing.pop(rank)
                passes.append(Timed(kind, stage, micro, begin, now))
                if kind != WEIGHTS:  # no pass waits for gradients of weights
                    done[F if kind == F else B, stage, micro] = now
                if kind == INPUTS:
                    weights[rank].append((WEIGHTS, stage, micro))
    return passes


def _ready(op: Op, done: dict[Op, float], stages: Stages, count: int) -> float | None:
    """The time when the input of a pass is ready; None: not known yet."""
    kind, stage, micro = op
    if kind == F:
        if stage == 0:
            return 0.0
        before = done.get((F, stage - 1, micro))
        return None if before is None else before + stages.send[stage - 1]
    forward = done.get((F, stage, micro))
    if stage == count - 1 or forward is None:
        return forward
    after = done.get((B, stage + 1, micro))
    return None if after is None else max(forward, after + stages.send[stage])


@cache
def order(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    """The passes of one rank, as torch.distributed.pipelining orders them."""
    if schedule == "gpipe":
        return tuple((kind, rank, micro) for kind in (F, B) for micro in range(micro_batches))
    if schedule == "1f1b":
        ahead = [(F, rank, micro) for micro in range(micro_batches)]
        back = [(B, rank, micro) for micro in range(micro_batches)]
        return _alternate(ahead, back, min(micro_batches, ranks - rank))
    local = stages // ranks
    rounds = max(1, micro_batches // ranks)
    together = micro_batches // rounds  # micro batches of one stage before the rank turns to its next
    kind = INPUTS if schedule == "zero_bubble" else B
    ahead = [_looped(F, index, rank, ranks, local, together, False) for index in range(local * micro_batches)]
    back = [_looped(kind, index, rank, ranks, local, together, True) for index in range(local * micro_batches)]
    double = 1 if schedule == "zero_bubble" else 2
    return _alternate(ahead, back, min(len(ahead), (local - 1) * together + double * (ranks - 1 - rank) + 1))


def _looped(kind: str, index: int, rank: int, ranks: int, local: int, together: int, reverse: bool) -> Op:
    chunk = index // together % local
    chunk = local - 1 - chunk if reverse else chunk
    micro = index // (together * local) * together + index % together
    return kind, chunk * ranks + rank, micro


def _alternate(ahead: Sequence[Op], back: Sequence[Op], warm_up: int) -> tuple[Op, ...]:
    """`warm_up` forward passes, then one backward and one forward in turn, then the remaining backward passes."""
    passes = list(ahead[:warm_up])
    for index, op in enumerate(back):
        passes.append(op)
        passes += ahead[warm_up + index : warm_up + index + 1]
    return tuple(passes)


@cache
def order_with_weights(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    """The passes of one rank with the gradients of weights, as torch's InterleavedZeroBubble places them: one after
    each backward pass of inputs, from the (rank + 1)-th on, and the remaining ones at the end."""
    ops = order(schedule, rank, ranks, stages, micro_batches)
    passes, waiting, count = list[Op](), deque[Op](), 0
    for op in ops:
        passes.append(op)
        if op[0] == INPUTS:
            waiting.append((WEIGHTS, *op[1:]))
            if count >= rank:
                passes.append(waiting.popleft())
            count += 1
    return (*passes, *waiting)
