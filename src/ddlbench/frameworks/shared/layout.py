"""How many ranks each dimension of a mesh gets, and which: data x tensor x pipeline parallel. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, log2, prod

import numpy as np

from ddlbench.errors import WrongRankCount

Ranks = list[int]


@dataclass(frozen=True)
class Layout:
    """A mesh of dp replicas x tp parts of every layer x pp stages.

    Rank (stage * dp + replica) * tp + part: what is sent most goes between neighbours, activations within a layer
    first, gradients of replicas next.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def position(self, rank: int) -> tuple[int, int, int]:
        """Replica, part and stage of a rank."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return dp, tp, pp

    def groups(self, *dims: str) -> list[Ranks]:
        """All groups of the ranks that differ in these dimensions alone; every rank is in one. "dp": ranks with the
        same weights; "tp": those that share every layer of a stage; "pp": the stages of a pipeline in their order;
        "pp", "tp": all parts of all stages of a replica."""
        ranks, axes = np.arange(self.pp * self.dp * self.tp), ("pp", "dp", "tp")
        mesh = ranks.reshape([getattr(self, dim) for dim in axes])
        last = np.moveaxis(mesh, [axes.index(dim) for dim in dims], range(-len(dims), 0))
        return last.reshape(-1, prod(getattr(self, dim) for dim in dims)).tolist()


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def fill(world_size: int, **asked: int | None) -> dict[str, int]:
    """The ranks of each dimension of a mesh. The one that is None gets all ranks that the others leave.

    Raises WrongRankCount with the nearest mesh where they do not fill the world, or where several are None.
    """
    size_free, rest = divmod(world_size, prod(size or 1 for size in asked.values()))
    open_ones = [dim for dim, size in asked.items() if size is None]
    if rest or len(open_ones) > 1 or (size_free > 1 and not open_ones):
        mesh = " x ".join(f"framework.{dim}={size or 'null'}" for dim, size in asked.items())
        near = zip(asked, nearest_mesh(world_size, list(asked.values())), strict=True)
        fits = " ".join(f"framework.{dim}={size}" for dim, size in near)
        wrong = "has more than one free dimension for" if len(open_ones) > 1 else "does not fill"
        raise WrongRankCount(f"{mesh} {wrong} {world_size} ranks: choose {fits}")
    return {dim: size or size_free for dim, size in asked.items()}


def nearest_mesh(world_size: int, asked: Sequence[int | None]) -> tuple[int, ...]:
    """The sizes that fill the ranks with the least change of those asked for, in factors. Of several, that with the
    most of the first dimension, the replicas, because layers and stages cannot be cut as often."""

    def change(mesh: tuple[int, ...]) -> tuple[float, int]:
        factors = (abs(log2(size / wanted)) for size, wanted in zip(mesh, asked, strict=True) if wanted)
        return round(sum(factors), 9), -mesh[0] if asked[0] else 0  # equal sums may differ in the last digit

    meshes = product(divisors(world_size), repeat=len(asked))
    return min((mesh for mesh in meshes if prod(mesh) == world_size), key=change)
