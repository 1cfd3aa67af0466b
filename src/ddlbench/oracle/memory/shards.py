"""Weights in shards: who gathers and reduces what, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddlbench.frameworks.deepspeed.knobs import BUCKET_MB
from ddlbench.oracle.counts.counts import Block
from ddlbench.oracle.memory.memory import Sizes, activations, buffers, held, memory, sizes
from ddlbench.oracle.memory.peak import Beside, Moment, batch, fullest, passing, updating
from ddlbench.oracle.memory.zero import Stage3, memory3
from ddlbench.oracle.setting import Memory, Setting
from ddlbench.oracle.timing.overlap import MiB

Calls = tuple[tuple[int, ...], ...]  # of blocks that share a message, by index


@dataclass(frozen=True)
class Scheme:
    """weight, gradient: bytes of a number as it is gathered and reduced.

    gathered: numbers of each block that are gathered; again: whether they are for the backward pass, too
    gathers, reductions: the blocks of each message
    always: reduced after every micro batch, not only the last; own_copy: the optimizer keeps a copy of the weights
    host_computes: whether there is no device that computes while the host goes on
    persistent: numbers that every rank keeps whole, which are gathered once, after the update
    stage3: what DeepSpeed holds beside
    """

    shards: int
    weight: int
    gradient: int
    gathered: tuple[int, ...]
    again: tuple[bool, ...]
    gathers: Calls
    reductions: Calls
    always: bool
    own_copy: bool = False
    host_computes: bool = False
    persistent: int = 0
    stage3: Stage3 | None = None

    @property
    def stay(self) -> float:
        """Bytes of gathered weights that stay from the forward to the backward pass."""
        return self.weight * sum(number for number, again in zip(self.gathered, self.again, strict=True) if not again)


def memory_of(setting: Setting, scheme: Scheme, samples: float, count: int) -> Memory:
    """With the gathered weights that are there at once, and what is reduced: a bucket, of FSDP the largest block."""
    blocks, job = setting.counts.blocks, setting.job
    own = held(setting.counts.numbers, setting, 3, scheme.shards, scheme.own_copy)
    own = replace(own, parameters=own.parameters + scheme.persistent * scheme.weight)
    each = sizes(setting.counts.at(samples), samples)
    if scheme.weight == 2:  # gathered in two bytes: autograd keeps no cast copies of them
        each = [_without(one, 2.0 * block.numbers) for one, block in zip(each, blocks, strict=True)]
    kept = activations(each, job.checkpoint_activations)
    largest = max(block.numbers for block in blocks)
    reduced = BUCKET_MB * MiB if scheme.own_copy else largest * 4.0
    room = buffers(blocks) + _gathered(scheme) * scheme.weight + reduced
    stays = buffers(blocks) + batch(job, samples * count, samples)
    if scheme.stage3 is not None:
        return memory(own, kept, room, memory3(setting, scheme.stage3, own, each, stays))
    arrived, beside = [4.0 * block.numbers / scheme.shards for block in blocks], _beside(blocks, scheme)
    last = _added_up(beside, blocks) if count > 1 else beside
    during = passing(each, job.checkpoint_activations, arrived, last)
    if count > 2:
        whole = Moment(4.0 * setting.counts.numbers, passing(each, job.checkpoint_activations, None, beside).others)
        during = max(during, whole, key=sum)
    update = updating(setting.optimizer, blocks, 1 / scheme.shards)
    return memory(own, kept, room, fullest(own, during, stays + scheme.stay, update, in_place=False))


def _added_up(beside: Beside, blocks: Sequence[Block]) -> Beside:
    """In the last micro batch: between micro batches FSDP adds up whole gradients. Those of a block are reduced with
    its backward pass."""
    whole = list(accumulate(4.0 * block.numbers for block in blocks))
    return Beside(
        [each + whole[-1] for each in beside.ahead],
        [each + before for each, before in zip(beside.back, whole, strict=True)],
    )


def _without(block: Sizes, bytes_: float) -> Sizes:
    names = ("kept", "ahead", "back", "added", "freeing", "freeing_added")
    return block._replace(**{name: max(0.0, getattr(block, name) - bytes_) for name in names})


def _beside(blocks: Sequence[Block], scheme: Scheme) -> Beside:
    """Forward: a block's weights, and the message they came in until the next one's. Backward: its weights, those of
    the block that comes next, and the gradients of the one before on their way."""
    weights = [
        number * float(scheme.weight) * again for number, again in zip(scheme.gathered, scheme.again, strict=True)
    ]
    reduced = [block.numbers * float(scheme.gradient) for block in blocks]
    back = [now + ahead + sent for now, ahead, sent in zip(weights, [0.0, *weights], [*reduced[1:], 0.0], strict=False)]
    return Beside([2 * weight for weight in weights], back)


def _gathered(scheme: Scheme) -> float:
    """Numbers of gathered weights at most: all that stay for the backward pass, and the two largest of the others."""
    stay = sum(number for number, again in zip(scheme.gathered, scheme.again, strict=True) if not again)
    others = sorted(number for number, again in zip(scheme.gathered, scheme.again, strict=True) if again)
    return stay + sum(others[-2:])
