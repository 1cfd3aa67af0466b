"""Seconds of a pipeline schedule: the order of the passes on each rank, and a simulation of when each pass starts.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), and the schedules of torch.distributed.pipelining with several
stages a rank, in its order. With p equal stages, m micro batches and free messages GPipe and 1F1B take (m + p - 1)
(F + B).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import lcm
from types import SimpleNamespace
from typing import Any, NamedTuple

from ddlbench.frameworks.pipeline.schedules import SCHEDULES

# Forward; backward; zero bubble's two backward passes, of inputs and of weights.
F, B, INPUTS, WEIGHTS = "F", "B", "I", "W"
OVERLAPPED = "O"  # DualPipeV's forward pass whose output is sent with the result of the backward pass after it
Op = tuple[str, int, int]  # kind, stage, micro batch


class Timed(NamedTuple):
    """A pass of a rank of the pipeline with its begin and end in seconds after the begin of the schedule."""

    kind: str
    stage: int
    micro: int
    begin: float
    end: float
    rank: int


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


@cache
def seconds(schedule: str, stages: Stages, ranks: int, micro_batches: int) -> float:
    """Seconds of all micro batches.

    A long GPipe or 1F1B is periodic: with messages 1F1B waits in some micro batches and not in others, and this repeats
    after a number of them that 1, 2, ... and all ranks divide. With more than six ranks the mean of eight groups of
    `ranks` micro batches stands for it (0.1 % off). So only the first periods are simulated.
    """
    steady, period = 8 * len(stages.forward) + 2, min(lcm(*range(1, ranks + 1)), max(60, 8 * ranks))
    if schedule not in ("gpipe", "1f1b") or micro_batches <= steady + period:
        return simulate(schedule, stages, ranks, micro_batches)[-1].end
    periods, rest = divmod(micro_batches - steady - period, period)
    before, there = (simulate(schedule, stages, ranks, steady + rest + more)[-1].end for more in (0, period))
    return there + periods * (there - before)


def simulate(
    schedule: str, stages: Stages, ranks: int, micro_batches: int, slower: Callable[[int], float] = lambda _: 1.0
) -> list[Timed]:
    """Run the passes of every rank in their order. Each pass starts as soon as its input is ready. Returns the passes
    in the order of their ends.

    slower: for ranks that share cores: while k of them compute at once, each pass takes slower(k) times as long
    """
    count, now = len(stages.forward), 0.0
    passes, done = list[Timed](), dict[Op, float]()
    orders = [deque(order(schedule, rank, ranks, count, micro_batches)) for rank in range(ranks)]
    held: dict[int, Op] = {}  # forward passes of ranks that send their output with the result of the next pass
    left: dict[int, float] = {}  # seconds of work left, of each rank that computes
    doing: dict[int, tuple[Op, float]] = {}  # with its begin
    while left or any(orders):
        arrivals: list[float] = []  # of the inputs that idle ranks wait for, if known
        for rank, todo in enumerate(orders):
            arrival = _ready(todo[0], done, stages, count) if todo and rank not in left else None
            if arrival is None:
                continue
            if arrival > now + 1e-12:
                arrivals.append(arrival)
                continue
            kind, stage, _ = op = todo.popleft()
            took = stages.forward[stage] if kind in (F, OVERLAPPED) else stages.backward[stage]
            doing[rank] = op, now
            left[rank] = took / 2 if kind in (INPUTS, WEIGHTS) else took
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
                passes.append(Timed(F if kind == OVERLAPPED else kind, stage, micro, begin, now, rank))
                if kind == OVERLAPPED:
                    held[rank] = F, stage, micro
                elif kind != WEIGHTS:  # no pass waits for gradients of weights
                    done[F if kind == F else B, stage, micro] = now
                    if rank in held:
                        done[held.pop(rank)] = now
    return passes


def _ready(op: Op, done: dict[Op, float], stages: Stages, count: int) -> float | None:
    """The time when the input of a pass is ready; None: not known yet."""
    kind, stage, micro = op
    if kind in (F, OVERLAPPED):
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
        warm_up = min(micro_batches, ranks - rank)
        passes = ahead[:warm_up]
        for micro in range(micro_batches):  # one backward and one forward pass in turn
            passes += [(B, rank, micro), *ahead[warm_up + micro : warm_up + micro + 1]]
        return tuple(passes)
    return _library_order(schedule, ranks, stages // ranks, micro_batches)[rank]


@cache
def _library_order(schedule: str, ranks: int, local: int, micro_batches: int) -> list[tuple[Op, ...]]:
    """The passes of each rank in the plan of torch.distributed.pipelining, made without a process group."""
    from torch.distributed.pipelining.schedules import get_schedule_class  # half a second to import

    stage = SimpleNamespace(group_size=ranks, group_rank=0, num_stages=ranks * local, is_last=False, submod=None)
    library: Any = get_schedule_class(SCHEDULES[schedule])
    # Without its messages, which take torch seconds at 64 ranks.
    without = type(library.__name__, (library,), {"_prepare_schedule_with_comms": lambda *_: None})
    plan = without([stage] * local, micro_batches).pipeline_order
    kinds = {"FULL_BACKWARD": B, "BACKWARD_INPUT": INPUTS, "BACKWARD_WEIGHT": WEIGHTS}
    orders = list[tuple[Op, ...]]()
    for actions in plan.values():
        passes = list[Op]()
        for action in filter(None, actions):
            forward = OVERLAPPED if action.sub_actions else F  # such an action is a forward and a backward pass
            for part in action.sub_actions or (action,):
                kind = {**kinds, "FORWARD": forward}[part.computation_type.name]
                passes.append((kind, part.stage_index, part.microbatch_index))
        orders.append(tuple(passes))
    return orders
