"""Which blocks of a model run again in the backward pass (train.checkpoint_activations), and the bytes that they keep.

A plan is a sequence of items in the order of the blocks. A number is a block that keeps what autograd saves: on the
host if the block is `Offloaded` (offloading.py), otherwise on the device. A tuple is a segment. It keeps only its input
(Chen et al. 2016), and runs again as a plan of its own before its backward pass. Plans with segments within segments
are the persistent schedules of Beaumont et al. 2019. `fastest` is their dynamic program for a chain of unequal blocks.

With `selective` the plan has no segments. Instead every block keeps less: its input and the outputs of its costly
operators (measure/formulas/flops.py), from which the other operators run again (Korthikanti et al. 2022). The counts of
a block (counts/) then contain this: saved bytes, peaks, and the second run as a part of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ddlbench.errors import Unsupported, UserError
from ddlbench.texts import GIB

Choice: TypeAlias = bool | str | list[str]  # a value of the key: True is `blocks`, False is `none`
Plan: TypeAlias = "tuple[int | Plan, ...]"  # of the indices of blocks
Names: TypeAlias = "list[str | Names]"  # a plan with the names of the blocks, as in a record
KEY = "train.checkpoint_activations"
SELECTIVE = "selective"


@dataclass(frozen=True)
class Link:
    """One block of a chain, for one micro batch. All numbers but `flops` are bytes.

    flops: of the forward pass
    saved: what autograd saves for the backward pass, without what an earlier block has saved
    output: of the block; unsaved_output: the same, 0 if autograd saves it
    forward, backward: the peaks of its passes, with temporary results, beyond what earlier blocks have saved
    fixed: the part of `saved` that does not grow with the samples: casts of weights, which are not offloaded
    """

    flops: float
    saved: float
    output: float
    unsaved_output: float
    forward: float
    backward: float
    fixed: float = 0.0

    @property
    def offloaded(self) -> float:
        """Bytes that go to the host and come back if it is offloaded."""
        return self.saved - self.fixed

    @property
    def kept_output(self) -> float:
        """Bytes by which a kept output adds to what the next block counts as its own."""
        return self.output - self.unsaved_output


class Offloaded(int):
    """An item of a plan: a block whose saved tensors are on the host from the end of the next block's forward pass to
    the beginning of that block's backward pass."""


def choice(value: Any) -> Choice:
    """The value of the key in the form that records have. UserError if the key has no such value."""
    kind, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    segments = kind == "every" and number.isascii() and number.isdigit() and int(number) > 0
    if isinstance(value, bool) or value == SELECTIVE or segments or (kind == "budget" and budget_bytes(value) > 0):
        return value
    if value in ("none", "blocks"):
        return value == "blocks"
    names = cast(list[Any], value) if isinstance(value, list) else []
    if names and all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
        return names
    raise UserError(
        f"{KEY}={value} must be none, blocks, selective, every:K (segments of K blocks, 1 or more), a list of "
        "different blocks, or budget:GiB (more than 0)"
    )


def budgeted(choice: Choice) -> bool:
    return isinstance(choice, str) and choice.startswith("budget:")


def budget_bytes(choice: str) -> float:
    """The bytes of budget:GiB; 0 if this is no finite number."""
    with suppress(ValueError):
        gib = float(choice.partition(":")[2])
        return gib * GIB if gib < inf else 0.0
    return 0.0


def plan_of(choice: Choice, names: Sequence[str], links: Callable[[], Sequence[Link]], in_flight: int = 1) -> Plan:
    """The plan for consecutive blocks of these names.

    links: of these blocks; called only for a budget
    in_flight: micro batches whose activations are in memory at once: they share a budget in equal parts
    Unsupported for a budget that no plan fits, with the smallest budget that a plan fits.
    """
    blocks = range(len(names))
    if isinstance(choice, bool) or choice == SELECTIVE:
        return tuple((index,) if choice is True else index for index in blocks)
    if isinstance(choice, list):
        return tuple((index,) if name in choice else index for index, name in enumerate(names))
    kind, _, number = choice.partition(":")
    if kind == "every":
        return tuple(tuple(blocks[first : first + int(number)]) for first in blocks[:: int(number)])
    chain = tuple(links())
    plan = fastest(chain, budget_bytes(choice) / in_flight)
    if plan is None:
        least = in_flight * float(_fronts(chain)(0, len(chain)).bytes_[0]) / GIB
        raise Unsupported(
            f"{KEY}={choice}: no set of blocks fits: the least for {names[0]} to {names[-1]} is {least:.3g} GiB with "
            f"{in_flight} micro batches in memory"
        )
    return plan


def check_names(choice: Choice, names: Sequence[str], key: str = KEY) -> None:
    """Unsupported for a block that the model does not have."""
    if isinstance(choice, list) and (unknown := next((name for name in choice if name not in names), None)):
        raise Unsupported(f"{key}: the model has no block {unknown}: its blocks are {', '.join(names)}")


def named(plan: Plan, names: Sequence[str]) -> Names:
    return [names[item] if isinstance(item, int) else named(item, names) for item in plan]


def flat(items: Plan | Names) -> list[Any]:
    """The blocks without their segments: indices of a plan, or names."""
    return [block for item in items for block in (flat(item) if isinstance(item, tuple | list) else [item])]


def repeats(plan: Plan, complete: bool = False, depth: int = 0) -> list[int]:
    """How often each block runs again: the number of segments around it. complete: to the end of the block; the second
    run of a segment stops in its last block, at the last tensor that the backward pass needs"""
    nested = ([depth] if isinstance(item, int) else repeats(item, complete, depth + 1) for item in plan)
    times = [count for counts in nested for count in counts]
    if complete and depth:
        times[-1] -= 1
    return times


def fastest(links: tuple[Link, ...], bytes_: float) -> Plan | None:
    """The plan that computes the fewest FLOPs again, among the plans whose `instants` fit so many bytes. None if no
    plan fits.

    This is the dynamic program of Beaumont et al. 2019 over the first item of each part of the chain. The item is a
    block, or a segment with the best plan for its blocks. The program does not round bytes to a grid: for each part it
    has every plan that no other plan beats in both bytes and FLOPs. A segment is never the last item, because its
    blocks can run for the first time in the way in which they would run again.
    """
    front = _fronts(links)
    fitting = int(np.searchsorted(front(0, len(links)).bytes_, bytes_, "right"))
    return _plan(front, 0, len(links), fitting - 1) if fitting else None


class _Front(NamedTuple):
    """The plans of a part of a chain that no other plan beats. Each plan has more bytes and fewer FLOPs than the plan
    before it.

    cut: the end of the segment that the plan begins with; the first block itself if the plan begins with no segment
    segment, later: the number of the plan of the segment, and of the plan of what follows
    """

    bytes_: NDArray[np.float64]
    flops: NDArray[np.float64]
    cut: NDArray[np.int64]
    segment: NDArray[np.int64]
    later: NDArray[np.int64]


Fronts: TypeAlias = Callable[[int, int], _Front]


@cache
def _fronts(links: tuple[Link, ...]) -> Fronts:
    """A function from the first index and the end of a part to its `_Front`. A part that ends before the chain ends is
    a segment."""

    @cache
    def front(first: int, end: int) -> _Front:
        link, held = links[first], links[end - 1].output if end < len(links) else 0.0
        if first == end - 1:
            here = max(link.backward, link.forward + (link.kept_output if held else 0.0))
            return _Front(np.array([here]), np.zeros(1), *(np.full(1, first) for _ in range(3)))
        here, after = max(link.backward, link.forward + held), front(first + 1, end)
        number = np.arange(len(after.flops))
        bytes_ = np.maximum(here, link.saved + after.bytes_)
        fronts = [_Front(bytes_, after.flops, np.full_like(number, first), number, number)]
        entering, passing, again = unsaved_input(links, first), link.forward, link.flops
        for cut in range(first + 1, end):
            base, inner, after = entering + links[cut - 1].kept_output, front(first, cut), front(cut, end)
            rest = base + after.bytes_
            bytes_ = np.maximum(np.concatenate([inner.bytes_, rest]), max(passing + held, inner.bytes_[0], rest[0]))
            segment, later = (np.searchsorted(part, bytes_, "right") - 1 for part in (inner.bytes_, rest))
            flops = again + inner.flops[segment] + after.flops[later]
            fronts.append(_Front(bytes_, flops, np.full_like(segment, cut), segment, later))
            passing, again = max(passing, base + links[cut].forward), again + links[cut].flops
        plans = _Front(*cast(Any, map(np.concatenate, zip(*fronts, strict=True))))
        order = np.lexsort((plans.flops, plans.bytes_))
        fewest = np.minimum.accumulate(plans.flops[order])
        unbeaten = order[np.diff(fewest, prepend=inf) < 0]
        return _Front(*cast(Any, (column[unbeaten] for column in plans)))

    return front


def _plan(front: Fronts, first: int, end: int, number: int) -> Plan:
    """The plan with this number in the front of a part."""
    if first == end:
        return ()
    made = front(first, end)
    cut, segment, later = int(made.cut[number]), int(made.segment[number]), int(made.later[number])
    if cut == first:
        return (first, *_plan(front, first + 1, end, later))
    return (_plan(front, first, cut, segment), *_plan(front, cut, end, later))


def unsaved_input(links: Sequence[Link], first: int) -> float:
    """Bytes of a segment's input that the block before it has not saved. The first input is not counted."""
    return links[first - 1].unsaved_output if first else 0.0


class Instant(NamedTuple):
    """The peak of one run of a block. backward: whether the run is in the backward pass, as a second run is; done: the
    first of the blocks whose backward passes are over; bytes_: of activations"""

    block: int
    backward: bool
    done: int
    bytes_: float


def kept(plan: Plan, links: Sequence[Link]) -> list[float]:
    """Bytes that stay until the backward pass: before each item of a plan, and after the last item."""
    bytes_ = [0.0]
    for item, following in zip(plan, (*plan[1:], None), strict=True):
        if isinstance(item, Offloaded):  # a block that is not offloaded keeps its input on the device
            output = 0.0 if isinstance(following, Offloaded) else links[item].kept_output
            bytes_.append(bytes_[-1] + links[item].fixed + output)
        elif isinstance(item, int):
            bytes_.append(bytes_[-1] + links[item].saved)
        else:
            blocks = flat(item)
            bytes_.append(bytes_[-1] + unsaved_input(links, blocks[0]) + links[blocks[-1]].kept_output)
    return bytes_


def instants(plan: Plan, links: Sequence[Link], before: float = 0.0, held: float | None = None) -> Iterator[Instant]:
    """Every run of a block, forward and backward.

    before: bytes in memory before the plan begins
    held: bytes of the gradient of its output while it runs again; None: it runs for the first time
    """
    at = [before + bytes_ for bytes_ in kept(plan, links)]
    # Bytes of the block before each item that are still on the device: in the item's forward pass, because the copies
    # to the host may not have ended; in its backward pass, because these bytes come back during it.
    going, coming = [0.0], [0.0]
    for item, following in pairwise(plan):
        link = links[item] if isinstance(item, Offloaded) else None
        coming.append(link.offloaded if link else 0.0)
        kept_twice = link.kept_output if link and not isinstance(following, Offloaded) else 0.0
        going.append(coming[-1] - kept_twice)
    final, end = plan[-1], flat(plan)[-1] + 1
    for item, base, beside in zip(plan, at, going, strict=False):
        blocks = flat((item,))
        for index in blocks:
            passing = base + beside
            if index > blocks[0]:  # a segment keeps no more than its input while it runs for the first time
                passing = base + unsaved_input(links, blocks[0]) + links[index - 1].kept_output
            if held is not None:  # torch ends a second run before an output that autograd does not save
                passing += held - (links[index].unsaved_output if index == final else 0.0)
            yield Instant(index, held is not None, end, passing + links[index].forward)
    for item, base, beside in reversed(list(zip(plan, at, coming, strict=False))):
        if isinstance(item, int):
            yield Instant(item, True, item + 1, base + beside + links[item].backward)
        else:
            yield from instants(item, links, base + beside, links[flat(item)[-1]].output)
