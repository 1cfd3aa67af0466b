"""What a run is made of: the inputs of the framework, the feed of this rank, and all that the loop needs."""

from __future__ import annotations

from functools import partial

import torch

from ddlbench.config.schema import Config
from ddlbench.data.feed import Feed, Request
from ddlbench.data.loaders.cores import fewest_cores, own_cores
from ddlbench.job import Job, Place
from ddlbench.loop import Run
from ddlbench.measure.devices.meter import Meter
from ddlbench.progress import Progress
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import all_gather
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.losses import make_loss
from ddlbench.recipe.optimizers import make_optimizer
from ddlbench.record.recorder import FileRecorder, NoRecorder
from ddlbench.run.checkpoints import open_checkpoints
from ddlbench.run.cold_cache import ColdCache
from ddlbench.run.context import Records
from ddlbench.run.scenarios import Scenario
from ddlbench.run.supervisor import Supervisor


def make_job(config: Config, launch: Launch, device: torch.device) -> Job:
    """The inputs of the framework."""
    train, recipe = config.train, config.recipe
    return Job(
        model=config.model,
        loss=make_loss(recipe.label_smoothing),
        optimizer=partial(make_optimizer, recipe.optimizer),
        device=device,
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        seed=train.seed,
        global_batch=train.samples_per_update(launch.world_size),
        micro_batch=train.micro_batch,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        clip_norm=train.clip_norm,
        checkpoint_activations=train.checkpoint_activations,
        compile=train.compile,
        channels_last=train.channels_last,
        timeout_s=train.timeout_s,
    )


def seed_replica(job: Job, place: Place) -> None:
    """Building the model left every rank the same random stream: replicas and stages would drop the same units."""
    part = place.data_rank + place.data_size * place.coordinates.get("pp", 0)
    torch.manual_seed((job.seed << 32) + part + 1)


def open_feed(config: Config, job: Job, place: Place) -> Feed:
    """The data as this rank reads them."""
    request = Request(
        model=config.model,
        place=place,
        device=job.device,
        seed=job.seed,
        replica_batch=job.replica_batch(place.data_size),
        steps=config.train.steps,
        channels_last=job.channels_last,
        cores=fewest_cores(all_gather(own_cores())),
    )
    return config.loader.open(config.data, request)


def make_run(
    scenario: Scenario, config: Config, job: Job, place: Place, feed: Feed, records: Records, supervisor: Supervisor
) -> Run:
    """What the scenario runs: everything is set up, and the data are open."""
    model = scenario.begin(feed)
    progress = Progress(config.progress and job.rank == 0)
    record = records.record
    return Run(
        job=job,
        place=place,
        feed=feed,
        epochs=config.train.epochs,
        warmup_steps=config.train.warmup_steps,
        recorder=FileRecorder(record, config, model, scenario, progress) if record else NoRecorder(),
        progress=progress,
        boundary=make_boundary(config, job, records, supervisor),
        validate=config.train.validate,
        val_words=records.dataset.get("val_words"),
        scored=config.loader.scored,
        meter=Meter(job.device, leader=job.local_rank == 0),
        open_checkpoints=partial(open_checkpoints, config, records, supervisor),
    )


def make_boundary(config: Config, job: Job, records: Records, supervisor: Supervisor) -> Boundary:
    if not config.train.cold_cache:
        return Boundary(job.device, supervisor.progressed, supervisor.stop)
    before_epoch = ColdCache(config, records, supervisor).drop
    return Boundary(job.device, supervisor.progressed, supervisor.stop, before_epoch=before_epoch)
