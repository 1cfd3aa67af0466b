"""What a run is made of once its model is set up: the feed of this rank, and all that the loop needs."""

from __future__ import annotations

import socket
from functools import partial

import torch

from ddlbench.cores import allowed_cores
from ddlbench.data.feed import Feed, Request
from ddlbench.data.loaders.cores import fewest_cores
from ddlbench.job import Job, Place
from ddlbench.loop import Run
from ddlbench.measure.devices.meter import Meter
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import all_gather
from ddlbench.record.recorder import FileRecorder, NoRecorder
from ddlbench.run.checkpoints import open_checkpoints
from ddlbench.run.cold_cache import ColdCache
from ddlbench.run.context import Attempt
from ddlbench.run.scenarios import Scenario
from ddlbench.run.supervisor import Supervisor


def seed_replica(job: Job, place: Place) -> None:
    """Building the model left every rank the same random stream: replicas and stages would drop the same units."""
    part = place.data_rank + place.data_size * place.coordinates.get("pp", 0)
    torch.manual_seed((job.seed << 32) + part + 1)


def open_feed(attempt: Attempt, place: Place) -> Feed:
    """The data as this rank reads them. Collective."""
    config, job = attempt.config, attempt.job
    request = Request(
        model=job.model,
        place=place,
        device=job.device,
        seed=job.seed,
        replica_batch=job.replica_batch(place.data_size),
        steps=config.train.steps,
        channels_last=job.channels_last,
        cores=fewest_cores(all_gather((socket.gethostname(), allowed_cores()))),
    )
    return config.loader.open(config.data, request)


def make_run(attempt: Attempt, scenario: Scenario, place: Place, feed: Feed, supervisor: Supervisor) -> Run:
    """What the scenario runs: everything is set up, and the data are open."""
    config, job, record = attempt.config, attempt.job, attempt.record
    model = scenario.begin(feed)
    progress = Progress(config.progress and job.rank == 0)
    boundary = Boundary(job.device, supervisor.progressed, supervisor.stop)
    if config.train.cold_cache:
        boundary.before_epoch = ColdCache(attempt, supervisor).drop
    return Run(
        job=job,
        place=place,
        feed=feed,
        epochs=config.train.epochs,
        warmup_steps=config.train.warmup_steps,
        recorder=FileRecorder(record, config, model, scenario, progress) if record else NoRecorder(),
        progress=progress,
        boundary=boundary,
        validate=config.train.validate,
        val_words=attempt.dataset.get("val_words"),
        scored=config.loader.scored,
        meter=Meter(job.device, leader=job.local_rank == 0),
        open_checkpoints=partial(open_checkpoints, attempt, supervisor),
    )
