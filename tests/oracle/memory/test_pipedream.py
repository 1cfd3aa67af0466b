"""The bytes of a stage of PipeDream, by hand."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.memory.peak import Moment
from ddlbench.oracle.memory.pipedream import Flight, Phase, fullest, phases
from ddlbench.oracle.memory.pipeline_passes import StageBytes

STAGE = StageBytes(kept=10, ahead=12, first=Moment(3, 11), back=15, gradients=7)
# Two stages come after it; its input has 2, its output 1, the minibatch 5.
FLIGHT = Flight(depth=2, count=1, buffered=False, incoming=2, outgoing=1, batch=5)
WAITING = 2 * (10 + 2) + 2 * 5 + 2  # two micro batches with inputs, two minibatches, the input of this one


def test_each_minibatch_in_flight_has_its_weights() -> None:
    """Forward beside the gradient that is sent back (2); backward with what it received (1), too; then a copy of the
    gradients is averaged (7), while the gradient of the input (2) is there; during the update the newest weights are
    copied."""
    assert list(phases(STAGE, FLIGHT, 7, update=6, reduced=7)) == [
        Phase(7, 2, WAITING + 3 + 2 + 7),
        Phase(0, 2, WAITING + 2 + 12),
        Phase(3, 2, WAITING + 3 + 11),
        Phase(7, 3, WAITING + 3 + 2 + 6),
    ]


def test_micro_batches_of_one_minibatch_share_weights_and_gradients() -> None:
    """Four a minibatch: two micro batches ahead are of the one before at most."""
    found = list(phases(STAGE, replace(FLIGHT, count=4), 7, update=6))
    assert [phase.versions for phase in found] == [1, 1, 1, 1, 2]
    assert found[1] == Phase(7, 1, WAITING - 5 + 2 + 12)


def test_two_minibatches_have_gradients_where_updates_wait() -> None:
    found = list(phases(STAGE, replace(FLIGHT, count=4, buffered=True), 7, update=6))
    assert [phase.gradients for phase in found] == [14, 14, 14, 14]


def test_the_last_stage_has_one_version() -> None:
    found = phases(STAGE, replace(FLIGHT, depth=0, outgoing=0, batch=0), 7, update=6)
    assert [phase.versions for phase in found] == [0, 0, 0, 0]


def test_versions_count_as_buffers() -> None:
    """The update: 100 of weights, three times again, 7, 200 and what lives."""
    memory = fullest(Bytes(100, 7, 200), STAGE, FLIGHT, update=6, reduced=0, room=1)
    assert memory.buffers == 1 + 300
    assert memory.total == 100 + 7 + 200 + 301 + WAITING + 11
