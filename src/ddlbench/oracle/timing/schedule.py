"""How long a pipeline schedule takes: the order of each rank's passes, and when each can begin.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved (Narayanan et al. 2021), zero bubble (Qi et al.
2023), PipeDream without a flush (Narayanan et al. 2019). With equal stages and free sending, one flush of p stages and
m micro batches takes (m + p - 1) (F + B).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

# Forward; backward; backward of inputs only; of weights, which come later and are not in `order`: they fill waits.
F, B, INPUTS, WEIGHTS = "F", "B", "I", "W"
Op = tuple[str, int, int]  # kind, stage, micro batch


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
    """From the first micro batch's begin to the last one's end. Stage i is on rank i % ranks.

    Of a long GPipe or 1F1B the steady part is simulated once: each further micro batch takes as long as the one before.
    """
    steady = 2 * len(stages.forward) + 2
    if schedule not in ("gpipe", "1f1b") or micro_batches <= steady:
        return simulate(schedule, stages, ranks, micro_batches)
    before, there = (simulate(schedule, stages, ranks, count) for count in (steady - 1, steady))
    return there + (micro_batches - steady) * (there - before)


def simulate(schedule: str, stages: Stages, ranks: int, micro_batches: int) -> float:
    """Run every rank's passes in their order, each as soon as what it needs is there."""
    count = len(stages.forward)
    done: dict[Op, float] = {}
    free = [0.0] * ranks
    orders = [deque(order(schedule, rank, ranks, count, micro_batches)) for rank in range(ranks)]
    weights = [deque[float]() for _ in range(ranks)]  # gradients of weights that wait
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(orders):
            while todo and (begin := _ready(todo[0], done, stages, count)) is not None:
                kind, stage, micro = todo.popleft()
                while weights[rank] and free[rank] < begin:  # zero bubble: fill the wait
                    free[rank] += weights[rank].popleft()
                took = stages.forward[stage] if kind == F else stages.backward[stage]
                if kind == INPUTS:
                    took /= 2
                    weights[rank].append(took)
                free[rank] = done[F if kind == F else B, stage, micro] = max(free[rank], begin) + took
                moved = True
    assert not any(orders), "the schedule waits for itself"
    return max(end + sum(late) for end, late in zip(free, weights, strict=True))


@dataclass
class _Ranks:
    """The ranks of a pipeline between two events. left: seconds of work left, of those that compute."""

    orders: list[deque[Op]]
    weights: list[deque[float]]
    left: dict[int, float]
    doing: dict[int, Op | None]  # None: gradients of weights, for which nothing waits
    busy: list[float]


def simulate_shared(
    schedule: str, stages: Stages, ranks: int, micro_batches: int, slower: Callable[[int], float]
) -> tuple[float, list[float]]:
    """Simulate ranks that share cores: while k of them compute at once, each takes slower(k) times as long. Returns the
    seconds, and the seconds in which each rank computes."""
    count, now = len(stages.forward), 0.0
    done: dict[Op, float] = {}
    orders = [deque(order(schedule, rank, ranks, count, micro_batches)) for rank in range(ranks)]
    state = _Ranks(orders, [deque[float]() for _ in range(ranks)], {}, {}, [0.0] * ranks)
    while state.left or any(orders) or any(state.weights):
        arrivals = _begin(state, stages, done, now)
        rate = slower(len(state.left)) if state.left else 1.0
        events = [arrival - now for arrival in arrivals] + [rest * rate for rest in state.left.values()]
        assert events, "the schedule waits for itself"
        passed = min(events)
        now += passed
        for rank in list(state.left):
            state.busy[rank] += passed
            state.left[rank] -= passed / rate
            if state.left[rank] <= 1e-12 * rate:
                _end(state, rank, stages, done, now)
    return now, state.busy


def _begin(state: _Ranks, stages: Stages, done: dict[Op, float], now: float) -> list[float]:
    """Let every idle rank begin what it can; when what the others wait for arrives, where that is known."""
    arrivals: list[float] = []
    for rank, todo in enumerate(state.orders):
        if rank in state.left:
            continue
        arrival = _ready(todo[0], done, stages, len(stages.forward)) if todo else None
        if arrival is not None and arrival <= now + 1e-12:
            kind, stage, _ = state.doing[rank] = todo.popleft()
            took = stages.forward[stage] if kind == F else stages.backward[stage]
            state.left[rank] = took / 2 if kind == INPUTS else took
        elif state.weights[rank]:
            state.doing[rank], state.left[rank] = None, state.weights[rank].popleft()
        elif arrival is not None:
            arrivals.append(arrival)
    return arrivals


def _end(state: _Ranks, rank: int, stages: Stages, done: dict[Op, float], now: float) -> None:
    del state.left[rank]
    if (op := state.doing.pop(rank)) is None:
        return
    kind, stage, micro = op
    if kind == INPUTS:
        state.weights[rank].append(stages.backward[stage] / 2)
    done[F if kind == F else B, stage, micro] = now


def _ready(op: Op, done: dict[Op, float], stages: Stages, count: int) -> float | None:
    """The time when the input of a pass is ready; None: not yet known."""
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
    """`warm_up` forward passes, then one backward and one forward in turn, then the backward passes that are left."""
    passes = list(ahead[:warm_up])
    for index, op in enumerate(back):
        passes.append(op)
        passes += ahead[warm_up + index : warm_up + index + 1]
    return tuple(passes)


@cache
def whole_order(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
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
