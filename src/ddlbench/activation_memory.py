"""The bytes of activations that a plan of blocks (recomputation.py) keeps, and the peak of each run of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ddlbench.recomputation import Link, Offloaded, Plan, ends, unsaved_input


class Instant(NamedTuple):
    """The peak of one run of a block. backward: whether it is in the backward pass, as a second run is; done: the first
    of the blocks whose backward passes are over; bytes_: of activations"""

    block: int
    backward: bool
    done: int
    bytes_: float


def kept(plan: Plan, links: Sequence[Link]) -> list[float]:
    """Bytes that stay until the backward pass: before each item of a plan, and after the last one."""
    bytes_ = [0.0]
    for item, following in zip(plan, (*plan[1:], None), strict=True):
        if isinstance(item, Offloaded):  # a block that is not offloaded keeps its input on the device
            output = 0.0 if isinstance(following, Offloaded) else links[item].kept_output
            bytes_.append(bytes_[-1] + links[item].fixed + output)
        elif isinstance(item, int):
            bytes_.append(bytes_[-1] + links[item].saved)
        else:
            first, last = ends(item)
            bytes_.append(bytes_[-1] + unsaved_input(links, first) + links[last].kept_output)
    return bytes_


def instants(plan: Plan, links: Sequence[Link], before: float = 0.0, held: float | None = None) -> Iterator[Instant]:
    """Every run of a block, forward and backward.

    before: bytes in memory before the plan begins
    held: bytes of the gradient of its output while it runs again; None: it runs for the first time
    """
    at = [before + bytes_ for bytes_ in kept(plan, links)]
    going, coming = _copied(plan, links)
    *_, final = plan
    _, end = ends(plan)
    for item, base, beside in zip(plan, at, going, strict=False):
        first, last = ends((item,))
        for index in range(first, last + 1):
            passing = base + beside
            if index > first:  # a segment keeps no more than its input while it runs for the first time
                passing = base + unsaved_input(links, first) + links[index - 1].kept_output
            if held is not None:  # torch ends a second run before an output that autograd does not save
                passing += held - (links[index].unsaved_output if index == final else 0.0)
            yield Instant(index, held is not None, end + 1, passing + links[index].forward)
    for item, base, beside in reversed(list(zip(plan, at, coming, strict=False))):
        if isinstance(item, int):
            yield Instant(item, True, item + 1, base + beside + links[item].backward)
        else:
            yield from instants(item, links, base + beside, links[ends(item)[1]].output)


def _copied(plan: Plan, links: Sequence[Link]) -> tuple[list[float], list[float]]:
    """Bytes of the block before that each item finds on the device: in its forward pass, because their copies to the
    host may not have ended; in its backward pass, because they come back during it."""
    going, coming = [0.0], [0.0]
    for item, following in pairwise(plan):
        link = links[item] if isinstance(item, Offloaded) else None
        coming.append(link.offloaded if link else 0.0)
        kept_twice = link.kept_output if link and not isinstance(following, Offloaded) else 0.0
        going.append(coming[-1] - kept_twice)
    return going, coming
