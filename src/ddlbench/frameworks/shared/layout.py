"""How many ranks each dimension of a mesh gets: data x tensor x pipeline parallel. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import log2, prod

from ddlbench.errors import UserError


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def fill(world_size: int, asked: Mapping[str, int | None], free: str) -> int:
    """The ranks of dimension `free`, which may be None in `asked`, when all dimensions together make up the world.

    Raises UserError with the nearest mesh where they cannot.
    """
    found, rest = divmod(world_size, prod(size or 1 for dim, size in asked.items() if dim != free))
    if rest or asked[free] not in (None, found):
        mesh = " x ".join(f"framework.{dim}={size or 'null'}" for dim, size in asked.items())
        near = zip(asked, nearest_mesh(world_size, list(asked.values())), strict=True)
        fits = " ".join(f"framework.{dim}={size}" for dim, size in near)
        raise UserError(f"{mesh} does not fill {world_size} ranks: choose {fits}")
    return found


def nearest_mesh(world_size: int, asked: Sequence[int | None]) -> tuple[int, ...]:
    """The sizes that fill the ranks with the least change of those asked for, in factors."""

    def change(mesh: tuple[int, ...]) -> float:
        return sum(abs(log2(size / wanted)) for size, wanted in zip(mesh, asked, strict=True) if wanted)

    meshes = product(divisors(world_size), repeat=len(asked))
    return min((mesh for mesh in meshes if prod(mesh) == world_size), key=change)
