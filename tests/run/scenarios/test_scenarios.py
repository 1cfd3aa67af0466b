"""`mode` chooses what an attempt does, in one table."""

from __future__ import annotations

from ddlbench.config.keys import MODES
from ddlbench.run.attempt import SCENARIOS


def test_every_mode_that_measures_has_a_scenario() -> None:
    assert (*SCENARIOS, "rehearsal") == MODES
