"""Which blocks of a model have their saved activations on the host between forward and backward pass
(train.offload_activations), and which of them run again instead.

The copies of a block have the forward pass of the next block to reach the host, and its backward pass to come back
(Rhu et al. 2016, vDNN); the computing waits for what is left. With a budget for both keys each block that does not fit
is swapped or recomputed, whichever delays the step less (Wahib et al. 2020, KARMA).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from operator import itemgetter
from typing import Any

from ddlbench import recomputation
from ddlbench.errors import Unsupported, UserError, refuse
from ddlbench.recomputation import SELECTIVE, Choice, Link, Offloaded, Plan, budget_bytes, budgeted, instants
from ddlbench.texts import GIB

KEY = "train.offload_activations"


def choice(value: Any) -> Choice:
    """The value of the key in the form that records have. UserError for a value that the key cannot have."""
    with suppress(UserError):
        if value != SELECTIVE and not str(value).startswith("every:"):
            return recomputation.choice(value)
    raise UserError(
        f"{KEY}={value} must be none, blocks, a list of different blocks, or budget:GiB (more than 0) for the "
        "activations that stay on the device"
    )


def check(recompute: Choice, offload: Choice) -> None:
    """UserError for values of both keys that contradict each other."""
    if offload and recompute == SELECTIVE:
        raise UserError(
            f"{recomputation.KEY}={recompute} and {KEY}={offload}: what `selective` keeps cannot be offloaded: set one "
            "of them to none"
        )
    if offload and (budgeted(recompute) or (recompute and budgeted(offload))) and recompute != offload:
        raise UserError(
            f"{recomputation.KEY}={recompute} and {KEY}={offload}: a budget is for both keys together: give the same "
            "budget to both, or none of them"
        )


def plan_of(
    recompute: Choice,
    offload: Choice,
    flops_per_byte: float,
    names: Sequence[str],
    links: Callable[[], Sequence[Link]],
    in_flight: int = 1,
) -> Plan:
    """The plan for consecutive blocks of these names, as `recomputation.plan_of`, with offloaded ones.

    flops_per_byte: FLOPs that the device computes while it copies a byte to or from the host
    Unsupported for blocks that cannot be offloaded, and for a budget that is too small.
    """
    if budgeted(offload):  # the plan that delays the step least: consecutive blocks are emptied, or none is offloaded
        chain, budget = links(), budget_bytes(str(offload))
        borders = [(0, 0), *combinations(range(len(chain)), 2)]
        plans = [_emptied(chain, range(first, end), bool(recompute), flops_per_byte) for first, end in borders]
        if recompute and (again := recomputation.fastest(tuple(chain), budget)) is not None:
            counts = zip(recomputation.repeats(again), chain, strict=True)
            plans.append((sum(count * link.flops for count, link in counts), again))
        peaks = [max(run.bytes_ for run in instants(plan, chain)) for _, plan in plans]
        fitting = [plan for plan, bytes_ in zip(plans, peaks, strict=True) if bytes_ <= budget]
        if not fitting:
            raise Unsupported(
                f"{KEY}={offload}: no number of blocks fits: the least for {names[0]} to {names[-1]} is "
                f"{min(peaks) / GIB:.3g} GiB"
            )
        return min(fitting, key=itemgetter(0))[1]
    plan = recomputation.plan_of(recompute, names, links, in_flight)
    if not offload:
        return plan
    listed, last, others = isinstance(offload, list), names[-1], f"name other blocks, or set {KEY}=none"
    chosen = offload if isinstance(offload, list) else list(names[:-1])
    recomputation.check_names(chosen, names, KEY)
    kept = [names[item] for item in plan if isinstance(item, int)]
    result = tuple(Offloaded(item) if isinstance(item, int) and names[item] in chosen else item for item in plan)
    reasons = {
        f"cannot offload {last}: its backward pass begins when its forward pass ends: {others}":
            listed and last in chosen,
        f"cannot offload blocks that run again ({recomputation.KEY}): {others}": listed and set(chosen) - set(kept),
        f"cannot offload a block: all before {last} run again ({recomputation.KEY}): {others}": not offloaded(result),
    }  # fmt: skip
    refuse(KEY, reasons)
    return result


def offloaded(plan: Plan) -> list[int]:
    return [item for item in plan if isinstance(item, Offloaded)]


def exposed(copy: float, forward: float, backward: float) -> float:
    """What is left of two copies of a block, to the host and back, after the passes of the next block; in the unit of
    the arguments."""
    return max(0.0, copy - forward) + max(0.0, copy - backward)


def _emptied(
    links: Sequence[Link], indices: Sequence[int], recompute: bool, flops_per_byte: float
) -> tuple[float, Plan]:
    """The plan in which these blocks keep nothing, and what it adds to the step, in FLOPs. A block is offloaded if the
    computing waits for its copies no longer than its second run would take; the blocks are taken from the last to the
    first. A backward pass counts two forward passes, and a third one if it begins with a second run."""
    items: list[int | Plan] = list(range(len(links)))
    added = 0.0
    for index in reversed(indices):
        copy, following = links[index].offloaded * flops_per_byte, links[index + 1].flops
        passes = 3 if isinstance(items[index + 1], tuple) else 2
        late = exposed(copy, following, passes * following)
        again = recompute and late > links[index].flops
        items[index] = (index,) if again else Offloaded(index)
        added += links[index].flops if again else late
    return added, tuple(items)
