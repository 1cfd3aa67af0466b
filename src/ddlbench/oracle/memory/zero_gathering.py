"""The weights that DeepSpeed's stage 3 has gathered while a model runs (deepspeed.runtime.zero,
partitioned_param_coordinator)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


@dataclass(frozen=True)
class Gathered:
    """Numbers of the weights that stage 3 has gathered, at most while each block runs: forward with the messages that
    they came in, backward without those of blocks that are done."""

    ahead: list[float]
    back: list[float]


class Weight(NamedTuple):
    """A parameter that is gathered. block: its block; module: how many modules run before its own"""

    block: int
    module: int
    numbers: int


def gathered(weights: Sequence[Weight], again: Sequence[bool], limit: float) -> Gathered:
    """again: of each block, whether it is gathered for its backward pass anew; limit: numbers after which a message
    takes no more parameters.

    Every module, with weights or without, asks for one message more. Its parameters are copied out of it when the first
    of them is needed, and it stays until the last one is (`AllGatherCoalescedHandle`). One alone is not copied.
    """
    messages, inside = _messages([weight.numbers for weight in weights], limit)
    ahead, asked, used = [0.0] * len(again), 0, [0] * len(messages)
    flat = copies = 0.0
    for place, weight in enumerate(weights):
        own = inside[place]
        wanted = min(max(weight.module, own + 1), len(messages))
        flat += sum(map(sum, messages[asked:wanted]))
        asked = max(asked, wanted)
        coalesced = len(messages[own]) > 1
        copies += sum(messages[own]) if coalesced and not used[own] else 0.0
        used[own] += 1
        ahead[weight.block] = max(ahead[weight.block], flat + copies)
        flat -= sum(messages[own]) if coalesced and used[own] == len(messages[own]) else 0.0
        if again[weight.block] and (place + 1 == len(weights) or weights[place + 1].block != weight.block):
            copies -= sum(each.numbers for each in weights if each.block == weight.block)
    before = 0.0
    for index in range(len(ahead)):  # blocks without weights
        ahead[index] = before = ahead[index] or before
    return Gathered(ahead, _gathered_back(weights, again))


def _gathered_back(weights: Sequence[Weight], again: Sequence[bool]) -> list[float]:
    """What stayed of this block and those before; what is gathered anew for this one and the next."""
    numbers = [float(sum(each.numbers for each in weights if each.block == index)) for index in range(len(again))]
    stays = [0.0 if anew else number for number, anew in zip(numbers, again, strict=True)]
    anew = [number - stay for number, stay in zip(numbers, stays, strict=True)]
    return [total + own + later for total, own, later in zip(accumulate(stays), anew, [0.0, *anew], strict=False)]


def _messages(numbers: Sequence[int], limit: float) -> tuple[list[list[int]], list[int]]:
    """The parameters of each message, and the message of each parameter."""
    found, inside = list[list[int]](), list[int]()
    for number in numbers:
        if not found or sum(found[-1]) >= limit:
            found.append([])
        found[-1].append(number)
        inside.append(len(found) - 1)
    return found, inside
