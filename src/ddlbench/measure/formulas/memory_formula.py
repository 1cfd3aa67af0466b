"""Bytes of parameters, gradients and optimizer state of a rank by the papers' formulas, to compare with measured ones.

Rajbhandari et al. 2020, "ZeRO", section 3.1 (which bytes there are) and section 5 (which of them each stage divides);
Shoeybi et al. 2019, section 3 (tensor parallelism). Counts are numbers, not bytes; a tied parameter counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlbench.recipe.optimizers import Costs

FP32_BYTES = 4
# What a style of `Model.tensor_plan` splits; every other parameter is whole on each rank.
SPLIT = {
    **dict.fromkeys(("column", "qkv", "logits", "vocab", "filter", "norm"), ("weight", "bias")),
    **dict.fromkeys(("row", "channel"), ("weight",)),
}


@dataclass(frozen=True)
class Bytes:
    """Bytes of one parameter, or of all parameters of a rank."""

    parameters: float
    gradients: float
    optimizer: float

    def times(self, count: float) -> Bytes:
        return Bytes(self.parameters * count, self.gradients * count, self.optimizer * count)


def bytes_of_parameter(
    optimizer: Costs, own_copy: bool = False, number_bytes: int = FP32_BYTES, sizes: Sequence[int] = (1,)
) -> Bytes:
    """Bytes of one parameter, the mean of a rank.

    own_copy: the optimizer updates a copy of the weights and keeps it, as DeepSpeed's ZeRO does in fp32, too
    number_bytes: of a weight and of a gradient
    sizes: numbers in each tensor of the rank: states in 8 bits depend on them (Dettmers et al. 2022, section 2)"""
    state = optimizer.state_bytes(sizes) / (sum(sizes) or 1)
    return Bytes(number_bytes, number_bytes, state + FP32_BYTES * own_copy)


def data_parallel(count: int, of_parameter: Bytes, stage: int, ranks: int) -> Bytes:
    """Section 5 of ZeRO: stage 1 divides the optimizer state by the ranks, 2 the gradients too, 3 (and FSDP) the
    parameters too; 0 (and DDP) nothing. Padding, less than one row a parameter and rank, is added to that."""
    optimizer, gradients, parameters = (ranks if stage >= first else 1 for first in (1, 2, 3))
    total = of_parameter.times(count)
    return Bytes(total.parameters / parameters, total.gradients / gradients, total.optimizer / optimizer)


def touched(sizes: Sequence[int], ranks: int) -> npt.NDArray[np.int64]:
    """Numbers in all parameters of which each rank has a part, when they are laid end to end and cut into equal shards:
    the gradients of a library that keeps a gradient whole where a shard's boundary cuts it."""
    numbers = np.array(sizes)
    ends = np.cumsum(numbers)
    edges = ends[-1] * np.arange(ranks + 1) / ranks
    first, last = np.searchsorted(ends, edges[:-1], "right"), np.searchsorted(ends, edges[1:], "left")
    return ends[last] - (ends - numbers)[first]
