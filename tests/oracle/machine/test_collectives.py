from __future__ import annotations

from dataclasses import replace

import pytest

from ddlbench.errors import UserError
from ddlbench.oracle.machine.collectives import FORMULAS, Hop, Path, path, ring_all_reduce, send
from ddlbench.oracle.machine.machine import Sweep
from tests.oracle.made import LINKS, MACHINE

M = 8e9  # bytes
NEAR = Hop(2, 1e-6, 1e-10)  # two ranks of a node


def test_strided_groups_share_the_adapters_of_their_node() -> None:
    """8 ranks in 4 groups of 2, one rank on each node: each flow has a quarter of 1 GB/s. Neighbours stay within their
    node. 5 ranks on nodes of 4 are all ranks: in a ring one flow leaves each node."""
    assert path(MACHINE, 2, stride=4, world=8) == Path(2, Hop(1, 0.0, 0.0), Hop(2, 10e-6, 4e-9))
    assert path(MACHINE, 2, stride=2, world=8) == Path(2, NEAR, Hop(1, 0.0, 0.0))
    assert path(MACHINE, 5) == Path(5, Hop(4, 1e-6, 1e-10), Hop(2, 10e-6, 1e-9))


def test_nodes_may_cut_a_group_into_unequal_parts() -> None:
    """6 ranks on nodes of 4: 4 and 2. A ring has 2 (4 + 1) + 2 (1) start-ups. Groups of every eighth of 24 ranks:
    four groups send from each node. Groups of 12 with every second rank: two."""
    assert path(MACHINE, 6) == Path(6, Hop(4, 1e-6, 1e-10), Hop(2, 10e-6, 1e-9))
    assert ring_all_reduce(6.0, path(MACHINE, 6)) == pytest.approx(2 * (4e-6 + 10e-6) + 10e-9)
    assert path(MACHINE, 3, stride=8, world=24) == Path(3, Hop(1, 0.0, 0.0), Hop(3, 10e-6, 4e-9))
    assert path(MACHINE, 12, stride=2, world=24) == Path(12, Hop(2, 1e-6, 1e-10), Hop(6, 10e-6, 2e-9))
    assert path(replace(MACHINE, devices_per_node=8), 5, world=20).inner.ranks == 4, (
        "ranks 5 to 9 are 3 and 2, 12 to 16 4 and 1"
    )
    assert path(MACHINE, 2, stride=3, world=6) == Path(2, Hop(1, 0.0, 0.0), Hop(2, 10e-6, 2e-9)), "0 and 3 stay"


def test_a_group_that_begins_within_a_node_and_ends_in_the_next_crosses_the_network() -> None:
    """Of two groups of 3 on nodes of 4 the second has ranks 3, 4 and 5; of groups of 2 none crosses."""
    assert path(MACHINE, 3, world=6) == Path(3, NEAR, Hop(2, 10e-6, 1e-9))
    sweeps = {("all_reduce", 3): Sweep((0.0, 1e9), (0.0, 1.0))}
    assert path(replace(MACHINE, sweeps=sweeps), 3, world=6).seconds("all_reduce", 1e9) > 1.0
    assert path(replace(MACHINE, sweeps=sweeps), 3, world=3).seconds("all_reduce", 1e9) == 1.0
    assert path(MACHINE, 2, world=6) == Path(2, NEAR, Hop(1, 0.0, 0.0))


def test_a_collective_that_was_not_measured_has_the_equations_of_the_link() -> None:
    sweeps = {("all_reduce", 4): Sweep((0.0, 1e9), (0.0, 1.0))}
    to = path(replace(MACHINE, sweeps=sweeps), 4, world=4)
    assert to.seconds("all_reduce", 1e9) == 1.0
    assert to.seconds("all_gather", M) == path(MACHINE, 4, world=4).seconds("all_gather", M) > 0


def test_the_ends_of_one_pipeline_have_the_adapters_for_themselves() -> None:
    """Ranks 0 and 7, and no other pair; of two pipelines two pairs."""
    assert path(MACHINE, 2, stride=7, world=8).outer.beta == 1e-9
    assert path(MACHINE, 2, stride=6, world=8).outer.beta == 2e-9


def test_the_first_and_the_last_of_a_node_stay_within_it() -> None:
    """Four ranks on a node: there is one such pair, and no link between nodes is needed."""
    near = replace(MACHINE, links=LINKS[:1])
    assert path(near, 2, stride=3, world=4) == Path(2, NEAR, Hop(1, 0.0, 0.0))
    sweeps = {(kind, 2): Sweep((0.0, 1e9), (0.0, 1.0)) for kind in FORMULAS}
    measured = replace(near, links=(), sweeps=sweeps)
    assert path(measured, 2, stride=3, world=4).seconds("all_reduce", 1e9) == 1.0


def test_an_unknown_link_is_an_error_of_one_line() -> None:
    with pytest.raises(UserError, match="the link between nodes is not known: give alpha_s"):
        path(replace(MACHINE, links=LINKS[:1]), 8)


def test_a_collective_without_a_measurement_and_without_a_link_is_not_free() -> None:
    sweeps = {("all_reduce", 2): Sweep((0.0, 1e9), (0.0, 1.0))}
    with pytest.raises(UserError, match="the link within a node is not known: run python"):
        path(replace(MACHINE, links=(), sweeps=sweeps), 2)


def test_a_measured_sweep_replaces_the_links() -> None:
    """Straight lines between sizes, the last slope beyond: 1 s at 1 GB, 3 s at 2 GB, 5 s at 3 GB."""
    sweep = Sweep((0.0, 1e9, 2e9), (0.5, 1.0, 3.0))
    machine = replace(MACHINE, devices_per_node=8, sweeps={("all_reduce", 4): sweep})
    seconds = [path(machine, 4).seconds("all_reduce", size) for size in (5e8, 2e9, 3e9)]
    assert seconds == pytest.approx([0.75, 3.0, 5.0])
    assert machine.marks(8) == ["collectives measured with 4 ranks, not 8"]
    assert machine.marks(4) == []
    assert machine.marks(4, largest=3e9) == ["messages of up to 2e+09 bytes measured, not 3e+09"]
    assert machine.marks(4, largest=2e9) == MACHINE.marks(4, largest=3e9) == []
    assert machine.marks(4, 2) == ["collectives measured with 4 ranks, not 2"], "a group within the ranks"


def test_a_sweep_is_of_one_node() -> None:
    """Between nodes the links of the file hold: 6 and 2 start-ups, 14 GB at 1 GB/s, and 4 flows of 1 GB."""
    sweeps = {(kind, 4): Sweep((0.0, 1e9), (0.0, 1.0)) for kind in ("all_reduce", "send")}
    machine = replace(MACHINE, sweeps=sweeps)
    assert path(machine, 4, world=8).seconds("all_reduce", 1e9) == pytest.approx(1.0)
    ring = path(replace(machine, algorithm="ring"), 8)
    assert ring.seconds("all_reduce", M) == pytest.approx(2 * (6e-6 + 10e-6) + 14.0)
    assert (send(1e9, machine, 8, 0), send(1e9, machine, 8, 4)) == (pytest.approx(1.0), pytest.approx(10e-6 + 4.0))
    assert machine.marks(8) == []
    assert machine.marks(2) == ["collectives measured with 4 ranks, not 2"]
