"""How many ranks each dimension of a mesh gets, and which: data x tensor x pipeline parallel. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, log2, prod

from ddlbench.errors import WrongRankCount

Ranks = list[int]


@dataclass(frozen=True)
class Layout:
    """A mesh of dp replicas x tp parts of every layer x pp stages.

    Rank (stage * dp + replica) * tp + part: what is sent most goes between neighbours, activations within a layer
    first, gradients of replicas next. Each list below holds all groups of one kind, and every rank is in one of each.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def rank(self, dp: int = 0, tp: int = 0, pp: int = 0) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def position(self, rank: int) -> tuple[int, int, int]:
        """Replica, part and stage of a rank."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return dp, tp, pp

    def dp_groups(self) -> list[Ranks]:
        """Ranks with the same weights."""
        return [[self.rank(d, t, p) for d in range(self.dp)] for p in range(self.pp) for t in range(self.tp)]

    def tp_groups(self) -> list[Ranks]:
        """Ranks that share every layer of a stage."""
        return [[self.rank(d, t, p) for t in range(self.tp)] for p in range(self.pp) for d in range(self.dp)]

    def pp_groups(self) -> list[Ranks]:
        """The stages of a pipeline in their order."""
        return [[self.rank(d, t, p) for p in range(self.pp)] for d in range(self.dp) for t in range(self.tp)]

    def embedding_groups(self) -> list[Ranks]:
        """First and last stage, which both have a tied embedding. Only they are in a group."""
        return [[ranks[0], ranks[-1]] for ranks in self.pp_groups()]

    def replica_groups(self) -> list[Ranks]:
        """The ranks of a replica: all its parts of all its stages."""
        return [[self.rank(d, t, p) for p in range(self.pp) for t in range(self.tp)] for d in range(self.dp)]


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def fill(world_size: int, asked: Mapping[str, int | None], free: str) -> int:
    """The ranks of dimension `free`, which may be None in `asked`, when all dimensions together make up the world.

    Raises WrongRankCount with the nearest mesh where they cannot.
    """
    size_free, rest = divmod(world_size, prod(size or 1 for dim, size in asked.items() if dim != free))
    if rest or asked[free] not in (None, size_free):
        mesh = " x ".join(f"framework.{dim}={size or 'null'}" for dim, size in asked.items())
        near = zip(asked, nearest_mesh(world_size, list(asked.values())), strict=True)
        fits = " ".join(f"framework.{dim}={size}" for dim, size in near)
        raise WrongRankCount(f"{mesh} does not fill {world_size} ranks: choose {fits}")
    return size_free


def nearest_mesh(world_size: int, asked: Sequence[int | None]) -> tuple[int, ...]:
    """The sizes that fill the ranks with the least change of those asked for, in factors."""

    def change(mesh: tuple[int, ...]) -> float:
        return sum(abs(log2(size / wanted)) for size, wanted in zip(mesh, asked, strict=True) if wanted)

    meshes = product(divisors(world_size), repeat=len(asked))
    return min((mesh for mesh in meshes if prod(mesh) == world_size), key=change)
