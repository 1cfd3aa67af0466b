"""A whole run of scripted ranks (simulated.py): from the program's configuration to the files of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddlbench.config.compose import configuration, make_job
from ddlbench.config.keys import added_later
from ddlbench.config.schema import Config
from ddlbench.job import Batch, Job, Place
from ddlbench.loop import Recorder, Run, train
from ddlbench.measure import rows
from ddlbench.measure.devices.memory import PEAKS
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.launchers import Launch
from ddlbench.recipe.recipe import Rates
from ddlbench.record.record import Record
from ddlbench.record.recorder import FileRecorder
from ddlbench.record.run_json import model_section, training_ledger
from tests.support.simulated import RankScript, ScriptedFeed, ScriptedTrainer, World

CPU = torch.device("cpu")
SPANS = {"imports_s": 1.0, "connecting_s": 0.5, "data_preparation_s": 64.0, "setup_s": 2.0}
FLOPS_PER_SAMPLE = 4e9


@dataclass
class Scripted:
    """One run: its options, and what each rank does.

    places, scripts, memory, val_batches: by rank; memory: [rank][epoch], bytes at the host's peak
    loss: (replica, step of the run) -> loss of that replica's batch
    """

    words: Sequence[str]
    places: Sequence[Place]
    scripts: Sequence[RankScript]
    memory: Sequence[Sequence[int]]
    val_batches: Sequence[Batch]
    loss: Callable[[int, int], float] = lambda replica, step: 1.0

    def record(self, results: Path, patch: pytest.MonkeyPatch) -> None:
        """Train, validate and record as run/attempt.py does it."""
        config = configuration(*self.words)
        world = World(len(self.places))
        world.install(patch)
        read = [iter(peaks) for peaks in self.memory]
        patch.setattr(
            rows,
            "peaks",
            lambda device: dict.fromkeys(PEAKS) | {"memory_host_peak_bytes": next(read[world.own.rank])},
        )
        name = f"{config.framework.name}-{world.size}-{config.train.repeat}"
        content = _content(config, world.size)
        record = Record.open(str(results), name, content)
        world.run(lambda rank: self._rank(rank, world, config, record))
        assert record.finish("ok")

    def _rank(self, rank: int, world: World, config: Config, record: Record) -> None:
        place, script = self.places[rank], self.scripts[rank]
        job = make_job(config, launch(rank, world.size), CPU)
        trainer = ScriptedTrainer(world, script, place, lambda step: self.loss(place.data_rank, step))
        reported = [batch for batch, there in zip(self.val_batches, self.places, strict=True) if there.reports]
        val_samples = sum(int(batch.valid.sum()) for batch in reported)
        feed = ScriptedFeed(world, script, job.replica_batch(place.data_size), self.val_batches[rank], val_samples)
        rates = Rates(lambda step: 0.125)
        model = {**model_section(config.model, None), "flops_per_sample": FLOPS_PER_SAMPLE}
        files = FileRecorder(record, config, model, subject(trainer, rates, config), Progress(False))
        run = Run(
            job, place, feed, config.train.epochs, config.train.warmup_steps, files if rank == 0 else Recorder(),
            Progress(False), Boundary(CPU),
        )  # fmt: skip
        run.recorder.begin(run, SPANS, [f"node{number // 2}" for number in range(world.size)])
        train(run, trainer, rates)  # pyright: ignore
        run.recorder.end(run, [feed.facts()] * world.size)


def subject(trainer: Any, rates: Rates, config: Config) -> Any:
    """The facts of mode=train, for a trainer without a model."""

    def counted(run: Run, steps: int) -> dict[str, Any]:
        return training_ledger(run, trainer, rates, config.recipe, steps)

    return SimpleNamespace(facts=trainer.facts, ledger=counted)


def launch(rank: int, world_size: int) -> Launch:
    return Launch("torchrun", rank, world_size, rank, world_size, 1, "127.0.0.1", 29500)


def job_of(words: Sequence[str], world_size: int = 1) -> tuple[Config, Job]:
    """The configuration of these words, and its job on rank 0."""
    config = configuration(*words)
    return config, make_job(config, launch(0, world_size), CPU)


def _content(config: Config, world_size: int) -> dict[str, Any]:
    """What run_json.opening returns, for a machine whose values are fixed."""
    return {
        "config": config.resolved,
        "config_added_later": added_later(config),
        "model": {"changed": {}},
        "launch": {
            "launcher": "torchrun", "world_size": world_size, "nodes": 1, "ranks_per_node": world_size,
            "device_type": "cpu", "backend": "gloo",
        },
        "environment": {"torch": "2.14.1", "cuda": None, "cpu_model": "Example CPU"},
        "dataset": {"name": config.data.name, "hash": "a" * 64, "train_samples": 24, "val_samples": 5},
    }  # fmt: skip
