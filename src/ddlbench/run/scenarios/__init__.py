"""What an attempt does, one file a scenario. `mode` in the configuration chooses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddlbench.config.schema import Config
from ddlbench.job import Job
from ddlbench.loop import Scenario
from ddlbench.run.scenarios.loading import Loading
from ddlbench.run.scenarios.training import Training

SCENARIOS: Mapping[str, Callable[[Config, Job], Scenario]] = {"train": Training, "loader": Loading}
