"""Seconds of a collective by the alpha-beta model: alpha seconds to start a message, beta seconds a byte.

The algorithms: ring (Patarasuk and Yuan 2009; equations of Kahira et al. 2021), double binary tree (Sanders et al.
2009; NCCL uses it between nodes), hierarchical (first within the nodes, then between them; Horovod has it as an
option). `m` is always the complete message in bytes: what each rank has after an all-reduce or an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil, log2

import numpy as np

from ddlbench.errors import UserError
from ddlbench.oracle.machine.machine import Link, Machine, Sweep

NO_LINK = Link("none", 0.0, float("inf"))


@dataclass(frozen=True)
class Hop:
    """One level of a group: `ranks` at this level, alpha in seconds, beta in seconds a byte of one flow. With one rank
    alpha and beta are 0."""

    ranks: int
    alpha: float
    beta: float


@dataclass(frozen=True)
class Path:
    """The connection of the ranks of a group: `inner` within a node, `outer` between nodes; or measured collectives.
    A node may have fewer ranks of the group than `inner`.

    The beta of `outer` is that of one flow into and out of a node while the other groups of its devices send, too.
    algorithm: of all-reduces, a key of ALGORITHMS
    """

    ranks: int
    inner: Hop
    outer: Hop
    measured: Mapping[str, Sweep] = field(default_factory=dict[str, Sweep])
    algorithm: str = "auto"

    def seconds(self, kind: str, m: float) -> float:
        """Seconds of a collective (a key of FORMULAS) of m bytes: as measured, else by its formula."""
        if self.ranks == 1 or m == 0:
            return 0.0
        return self.measured[kind].at(m) if kind in self.measured else FORMULAS[kind](m, self)


def path(machine: Machine, ranks: int, stride: int = 1, world: int | None = None) -> Path:
    """The connection of a group of `ranks` among `world` ranks; neighbours in the group are `stride` ranks apart.
    UserError if the machine's file has no such link."""
    world = world or ranks * stride
    within, outside, sharing = spread(ranks, stride, world, machine.per_node(world))
    # Collectives are measured within one node. The equations of the link are for a kind that was not measured.
    sweeps = {kind: sweep for kind in FORMULAS if outside == 1 and (sweep := machine.sweep(kind, ranks)) is not None}
    inner = NO_LINK if len(sweeps) == len(FORMULAS) and not machine.links else link(machine, 0, within)
    outer = link(machine, 1, outside)
    return Path(
        ranks,
        Hop(within, inner.alpha_s, 1 / inner.bytes_per_s),
        Hop(outside, outer.alpha_s, sharing / outer.bytes_per_s),
        sweeps,
        machine.algorithm,
    )


@cache
def spread(ranks: int, stride: int, world: int, per_node: int) -> tuple[int, int, int]:
    """The slowest of all such groups (as for `path`) on nodes of `per_node` ranks: its ranks in one node, its nodes,
    and the groups that send through the adapters of one node. Nodes may cut a group into unequal parts."""
    first = np.arange(world - (ranks - 1) * stride)
    first = first[first // stride % ranks == 0]
    nodes = (first[:, None] + stride * np.arange(ranks)) // per_node  # of each group's ranks, in ascending order
    enters = np.diff(nodes, axis=1, prepend=-1) != 0  # the first rank of the group in a node
    outside, begins = enters.sum(1), np.flatnonzero(enters)
    together = np.diff(begins, append=enters.size)  # the ranks of a group in a node
    within = together[outside[begins // ranks] == outside.max()].max()
    crossing = nodes[enters & (outside > 1)[:, None]]
    return int(within), int(outside.max()), int(np.bincount(crossing, minlength=1).max()) or 1


def link(machine: Machine, level: int, ranks: int) -> Link:
    if ranks == 1:
        return NO_LINK
    if level >= len(machine.links):
        where, measuring = (  # nothing is measured between nodes
            ("within a node", "run python -m ddlbench.predict --calibrate-network there, or "),
            ("between nodes", ""),
        )[level]
        raise UserError(
            f"cluster {machine.name}: the link {where} is not known: {measuring}give alpha_s and bytes_per_s in a "
            "cluster file"
        )
    return machine.links[level]


def ring_all_reduce(m: float, to: Path) -> float:
    """Seconds of an all-reduce around a ring of p ranks on n nodes (Patarasuk and Yuan 2009). In 2 (p - 1) steps every
    rank sends m / p bytes to its neighbour. A piece waits for the start-ups of the links that it crosses, 2 (n - 1) of
    them between nodes, as in NCCL's estimate (`nInterSteps` of its tuning). The slowest link sets the time of the
    bytes."""
    inside, between = to.ranks - to.outer.ranks, to.outer.ranks - 1
    start = 2 * (inside * to.inner.alpha + between * to.outer.alpha)
    return start + 2 * (to.ranks - 1) / to.ranks * m * max(to.inner.beta, to.outer.beta)


def tree_all_reduce(m: float, to: Path) -> float:
    """Seconds of an all-reduce along a chain within each node and a double binary tree between the nodes (Sanders et
    al. 2009), once up and once down. Small pieces follow each other, so that only the start-ups of one piece add up.
    Each byte crosses a link twice in a direction. It crosses the link between two nodes only once, because each of the
    two trees sends half of the bytes up in one direction and down in the other: NCCL's all-reduce of 1 GB over 100
    Gbit/s took 134 ms, its ring 268 ms (github.com/NVIDIA/nccl-tests/issues/22)."""
    between = 1 if to.outer.ranks == 2 else 2
    return 2 * tree_start(to) + m * max(2 * to.inner.beta, between * to.outer.beta)


def tree_start(to: Path) -> float:
    """Seconds until the first piece has gone from the root of a tree to its last rank."""
    return (to.inner.ranks - 1) * to.inner.alpha + ceil(log2(to.outer.ranks)) * to.outer.alpha


def hierarchical_all_reduce(m: float, to: Path) -> float:
    """Reduce-scatter within the nodes, all-reduce of the pieces between them, all-gather within the nodes. All ranks of
    a node send their piece to other nodes at the same time and share the node's adapters."""
    inner, outer = to.inner, to.outer
    between = 2 * (outer.ranks - 1) * (outer.alpha + m / outer.ranks * outer.beta)
    return 2 * (inner.ranks - 1) * (inner.alpha + m / inner.ranks * inner.beta) + between


# Algorithms of all-reduces. auto: the faster one of the two that NCCL has for all networks.
ALGORITHMS: dict[str, Callable[[float, Path], float]] = {
    "auto": lambda m, to: min(ring_all_reduce(m, to), tree_all_reduce(m, to)),
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}


# Seconds of a collective of m bytes by equations. An all-gather goes once around a ring: half of the all-reduce. A
# reduce-scatter has as many messages as an all-gather, in reverse order. A broadcast goes down a tree in small pieces.
FORMULAS: dict[str, Callable[[float, Path], float]] = {
    "all_reduce": lambda m, to: ALGORITHMS[to.algorithm](m, to),
    "all_gather": lambda m, to: ring_all_reduce(m, to) / 2,
    "reduce_scatter": lambda m, to: to.seconds("all_gather", m),
    "broadcast": lambda m, to: tree_start(to) + m * max(to.inner.beta, to.outer.beta),
}


def send(m: float, machine: Machine, world: int, flows: int) -> float:
    """Seconds of a message of m bytes from a rank to another: alpha + m beta.

    flows: messages that leave one node at the same time and share its adapters; 0: none leaves a node
    """
    if not m:
        return 0.0
    measured = machine.sweep("send", world)
    if measured is not None and not flows:
        return measured.at(m)
    via = link(machine, int(flows > 0), 2)
    return via.alpha_s + m * max(1, flows) / via.bytes_per_s
