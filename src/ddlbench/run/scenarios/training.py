"""mode=train: a framework trains the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed
from ddlbench.errors import RunError
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks
from ddlbench.job import Job, Place, Trainer
from ddlbench.loop import Run, Scenario, train
from ddlbench.recipe.recipe import learning_rate
from ddlbench.recipe.schedules import Rates
from ddlbench.record.run_json import model_section, training_ledger
from ddlbench.run.checkpoints import check_checkpoints
from ddlbench.run.scenarios.window import profiled


@dataclass
class Training(Scenario):
    config: Config
    job: Job
    made: Trainer | None = None  # by `setup`
    rates: Rates = field(init=False)
    weights_hash: str | None = None  # of the initial model
    measured_facts: dict[str, Any] | None = None  # after the measured epochs, where steps follow that are not measured

    def check(self) -> None:
        self.config.framework.check(self.job)
        check_checkpoints(self.config, self.job)

    def setup(self) -> Place:
        self.made = self.config.framework.setup(self.job)
        return self.made.place

    def begin(self, feed: Feed) -> dict[str, Any]:
        epochs = self.config.train.epochs
        self.rates = Rates(learning_rate(self.config.recipe, self.job.global_batch, feed.steps_per_epoch, epochs))
        start = self.trainer.state()
        assert (start is None) == (self.job.rank != 0), "rank 0 alone has the full state"
        segments = self.trainer.facts().get("segments")
        checkpoint = partial(checkpoint_blocks, segments=segments) if segments else None
        model = model_section(self.config.model, start, checkpoint)
        self.weights_hash = model.get("weights_hash_start")
        return model

    def run(self, run: Run) -> None:
        run.open_checkpoints(run, self.trainer, self.rates)
        train(run, self.trainer, self.rates)
        if self.config.profile:
            self.measured_facts = self.trainer.facts()
            window = profiled(run, self.trainer, self.config.profile_steps)
            run.recorder.window(window.section(), window.profiler.save)
            if window.failure:
                raise RunError(window.failure)

    def facts(self) -> dict[str, Any]:
        return self.trainer.facts() if self.measured_facts is None else self.measured_facts

    def ledger(self, run: Run, steps: int) -> dict[str, Any]:
        trained = training_ledger(run, self.trainer, self.rates, self.config.recipe, steps)
        return trained | {"weights_hash_start": self.weights_hash}

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
            self.made = None

    @property
    def trainer(self) -> Trainer:
        assert self.made is not None, "`setup` comes first"
        return self.made
