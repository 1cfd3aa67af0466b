"""One attempt at a run: check, prepare, connect, set up, train, record, leave in order, whatever happens."""

from __future__ import annotations

import hashlib
import socket
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores, fewest_cores, machine_cores
from ddlbench.data.feed import Feed, Request
from ddlbench.data.staging import node_storage
from ddlbench.errors import PeerFailed, RunError, Unavailable, Unsupported, UserError, failure_of, why
from ddlbench.job import Job, Place
from ddlbench.loop import Recorder, Run, Scenario
from ddlbench.measure.devices.memory import give_back_freed
from ddlbench.measure.devices.meter import Meter
from ddlbench.progress import Progress, tell
from ddlbench.ranks.boundary import Boundary
from ddlbench.ranks.control import all_gather, barrier, single_process, wait_for
from ddlbench.ranks.launch import Launch, connect, disable_nccl_abort, disconnect, group_timeout, pick_device
from ddlbench.record.record import writable
from ddlbench.record.recorder import FileRecorder
from ddlbench.record.run_json import planned_run
from ddlbench.run.checkpoints import how_to_continue, open_checkpoints
from ddlbench.run.context import Attempt
from ddlbench.run.preflight import preflight
from ddlbench.run.scenarios import Loading, Training
from ddlbench.run.settings import (
    check_cold_cache,
    check_machine,
    check_precision,
    drop_data,
    planned_device,
    set_switches,
)
from ddlbench.run.supervisor import NO_STEP, Supervisor

SCENARIOS: Mapping[str, Callable[[Config, Job], Scenario]] = {"train": Training, "loader": Loading}  # by `mode`
INTERRUPTED = ("killed", "timeout")
NO_CONNECTION = (
    "no connection to the other ranks (check that every rank started, MASTER_ADDR, NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME)"
)


def run_attempt(config: Config, launch: Launch, started: float) -> int:
    """Run the configuration; the exit code of this process. started: perf_counter when the program began"""
    device = planned_device(config.dryrun)
    if device is None:
        check_machine(config.train.threads_per_rank, config.loader, machine_cores())
        device = pick_device(launch, config.backend)
    set_switches(config.train, device)
    attempt = Attempt(config, launch, device, started)
    scenario = SCENARIOS[config.mode](config, attempt.job)
    refusal = check(config, scenario, device)
    if config.dryrun:
        print(planned_run(config, attempt.job, refusal))
        if refusal is not None:
            tell(f"{refusal.status}: {refusal}")
        return 0 if refusal is None else refusal.exit_code
    attempt.end_span("imports_s")
    with Supervisor(attempt, config.train.timeout_s, config.train.time_limit_s) as supervisor, ExitStack() as opened:
        try:
            if device.type == "cuda":
                disable_nccl_abort()
            # After the timeout of the groups, because an error that `connect` raises has details.
            supervisor.expect(NO_CONNECTION, more_s=group_timeout(device, 10.0).total_seconds())
            connect(launch, device, config.train.timeout_s, config.backend, reached=supervisor.reach)
            supervisor.connect()  # from now on every rank watches for failures of the others
            attempt.count_nodes()
            attempt.end_span("connecting_s")
            with reading_data():
                attempt.open_record()
            wait_for([0], "ddlbench/data")
            attempt.end_span("data_preparation_s")
            if refusal:
                raise refusal
            attempt.agree()
            with reading_data():
                attempt.stage_data()
            if config.preflight:
                supervisor.expect("the pre-flight check did not end")
                preflight(attempt)
                attempt.end_span("preflight_s")
            supervisor.expect("the framework's setup did not end")
            work(attempt, scenario, supervisor, opened)
            # The end is recorded before anything is closed, because closing may hang.
            supervisor.expect_nothing()
            code = 0 if attempt.record_success() else 1
            wait_for([0], "ddlbench/end")
            supervisor.leave()  # the rank that holds the store may now go first
            supervisor.expect_end(code)
            close(opened)
        except Exception as error:  # every kind of failure becomes a row
            code = fail(error, attempt, supervisor)
            close(opened, error)
    return code


@contextmanager
def reading_data(kind: type[RunError] = UserError) -> Generator[None]:
    """Make an OSError of the data one line for the user."""
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise kind(
            f"the data cannot be read ({place}{why(error)}): check permissions and names of its files"
        ) from error


def check(config: Config, scenario: Scenario, device: torch.device) -> Unsupported | Unavailable | None:
    """Everything that can be known before anything starts, the same on every rank. A UserError ends the program;
    what the framework or the loader cannot do is returned, because it becomes a row."""
    writable(config.results_dir)
    if config.checkpoint.every is not None and config.checkpoint.folder is not None:
        writable(str(config.checkpoint.folder), "checkpoint.dir")
    with reading_data():
        config.data.check(config.model, config.train.validate)
    if config.data.stage_to is not None:
        node_storage(config.data.stage_to)
    try:
        scenario.check()
        config.loader.check(config.data, config.model, device)
        check_precision(config.train, device)
        if config.train.cold_cache:
            check_cold_cache(config.loader, config.data)
    except (Unsupported, Unavailable) as refusal:
        return refusal
    return None


def work(attempt: Attempt, scenario: Scenario, supervisor: Supervisor, opened: ExitStack) -> None:
    """The run itself, until it has ended on all ranks. opened: is to close the data, then the scenario"""
    opened.callback(scenario.close)
    config, job = attempt.config, attempt.job
    place = scenario.setup()
    seed_replica(job, place)
    supervisor.expect("the data were not opened")
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
    with reading_data(RunError):
        feed = config.loader.open(config.data, request)
    opened.callback(feed.close)
    attempt.end_span("setup_s")
    run = make_run(attempt, scenario, place, feed, supervisor)
    supervisor.expect("training did not begin")
    run.recorder.begin(run, attempt.spans, attempt.hosts)
    give_back_freed(attempt.device)
    supervisor.expect(NO_STEP)
    scenario.run(run)
    run.recorder.end(run, all_gather(feed.facts()))
    barrier()


def seed_replica(job: Job, place: Place) -> None:
    """Give each replica and each stage other random numbers. Building the model has left the same on every rank, and
    dropout would drop the same units everywhere.

    torch's generator on the CPU takes the low 32 bits of a seed, so the digest spreads train.seed over all bits. Parts
    follow one another, because ranks that share layers add the number of parts to the seed in each step.
    """
    part = place.data_rank + place.data_size * place.coordinates.get("pp", 0)
    digest = hashlib.blake2b(job.seed.to_bytes(8), digest_size=7).digest()  # torch takes seeds below 2**64
    torch.manual_seed(int.from_bytes(digest) + part)


def make_run(attempt: Attempt, scenario: Scenario, place: Place, feed: Feed, supervisor: Supervisor) -> Run:
    """What the scenario gets once everything is set up and the data are open."""
    config, job, record = attempt.config, attempt.job, attempt.record
    model = scenario.begin(feed)
    progress = Progress(config.progress and job.rank == 0)
    boundary = Boundary(job.device, supervisor.progressed, supervisor.stop.pass_boundary)
    if config.train.cold_cache:
        boundary.before_epoch = partial(drop_data, attempt, supervisor)
    return Run(
        job=job,
        place=place,
        feed=feed,
        epochs=config.train.epochs,
        warmup_steps=config.train.warmup_steps,
        recorder=FileRecorder(record, config, model, scenario, progress) if record else Recorder(),
        progress=progress,
        boundary=boundary,
        validate=config.train.validate,
        val_words=attempt.dataset.get("val_words"),
        scored=config.loader.scored,
        meter=Meter(job.device, leader=job.local_rank == 0),
        open_checkpoints=partial(open_checkpoints, attempt, supervisor),
    )


def fail(error: Exception, attempt: Attempt, supervisor: Supervisor) -> int:
    """Record the failure that came first, of this rank or of another one; returns the exit code of this process."""
    mine = failure_of(error, attempt.launch.rank)
    first = supervisor.record_cause(mine, begun=not isinstance(error, UserError))
    if first.rank == mine.rank:
        if not isinstance(error, RunError):  # an error of the program
            traceback.print_exception(error)
        tell(f"{first.status}: {first.reason}")
        if first.status in INTERRUPTED and (line := how_to_continue(attempt)):
            tell(line)
    supervisor.wait_for_readers(first)
    code = mine.exit_code if mine.status == first.status else PeerFailed.exit_code
    supervisor.expect_end(code)
    return code


def close(opened: ExitStack, error: BaseException | None = None) -> None:
    """Close the data, drop the model and destroy the process groups, because they must not be destroyed while a wrapped
    model lives. The end is recorded: what goes wrong here changes nothing.

    error: what has ended the run; None: all ranks call this. After an error another rank may still be in a collective,
        and the program ends without `disconnect`
    """
    clean = error is None
    while error is not None:  # the local variables of a setup that has failed half-way hold its model
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    try:
        opened.close()
        if clean or single_process():
            disconnect(clean)
    except Exception as error:
        tell(f"warning: {type(error).__name__} after the end of the run: {error}")
