"""What an attempt does, one file a scenario. `mode` in the configuration chooses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed
from ddlbench.job import Job, Place
from ddlbench.loop import Run
from ddlbench.record.recorder import Subject
from ddlbench.run.scenarios.loading import Loading
from ddlbench.run.scenarios.training import Training


class Scenario(Subject, Protocol):
    """What one attempt does. The methods are called in this order, on every rank; those of Subject on rank 0, from
    `begin` on."""

    def check(self) -> None:
        """Raise Unsupported or Unavailable for what cannot be run; called before any process group exists."""
        ...

    def setup(self) -> Place:
        """Set up what needs process groups; return the position of this rank."""
        ...

    def begin(self, feed: Feed) -> dict[str, Any]:
        """The data are open. Returns the record's section `model`."""
        ...

    def run(self, run: Run) -> None:
        """Every epoch, each handed to `run.record`."""
        ...

    def close(self) -> None:
        """Drop what `setup` made, also where it failed half way: process groups are destroyed after."""
        ...


SCENARIOS: Mapping[str, Callable[[Config, Job], Scenario]] = {"train": Training, "loader": Loading}


def choose(config: Config, job: Job) -> Scenario:
    return SCENARIOS[config.mode](config, job)
