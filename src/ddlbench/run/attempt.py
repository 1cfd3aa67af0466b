"""One attempt at a run: check, prepare, connect, set up, train, record, leave in order, whatever happens."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack

import torch

from ddlbench.config.keys import Train
from ddlbench.config.schema import Config
from ddlbench.data.staging import node_storage
from ddlbench.errors import PeerFailed, RunError, Unavailable, Unsupported, UserError
from ddlbench.job import Job
from ddlbench.measure.devices.allocator import keep_freed_memory
from ddlbench.ranks.control import all_gather, barrier, single_process, wait_for
from ddlbench.ranks.launch import Launch, connect, disconnect, pick_device
from ddlbench.ranks.nccl import disable_nccl_abort
from ddlbench.record.record import writable
from ddlbench.record.run_json import planned_run
from ddlbench.run.assembly import make_run, open_feed, seed_replica
from ddlbench.run.checkpoints import how_to_continue
from ddlbench.run.cold_cache import check_cold_cache
from ddlbench.run.context import Attempt
from ddlbench.run.failure import Failure
from ddlbench.run.limits import check_machine, planned_device
from ddlbench.run.preflight import preflight
from ddlbench.run.scenarios import Scenario, choose
from ddlbench.run.supervisor import NO_STEP, Supervisor
from ddlbench.texts import printable

INTERRUPTED = ("killed", "timeout")
NO_CONNECTION = (
    "no connection to the other ranks (check that every rank started, MASTER_ADDR, NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME)"
)


def run_attempt(config: Config, launch: Launch, started: float) -> int:
    """Run what the configuration says; the exit code of this process. `started`: perf_counter as the program began."""
    device = planned_device(config.dryrun)
    if device is None:
        check_machine(config.train.threads_per_rank, config.loader)
        device = pick_device(launch, config.backend)
    set_switches(config.train, device)
    attempt = Attempt(config, launch, device, started)
    scenario = choose(config, attempt.job)
    refusal = check(config, scenario)
    if config.dryrun:
        return dry_run(config, attempt.job, refusal)
    attempt.spans.end("imports_s")
    limit = time_limit(config.train.time_limit_s, started)
    with Supervisor(attempt, config.train.timeout_s, limit) as supervisor, ExitStack() as opened:
        try:
            connect_ranks(attempt, supervisor)
            attempt.spans.end("connecting_s")
            attempt.open_record()
            wait_for([0], "ddlbench/data")
            attempt.spans.end("data_preparation_s")
            if refusal:
                raise refusal
            attempt.agree()
            attempt.stage_data()
            if config.preflight:
                supervisor.expect("the pre-flight check did not end")
                preflight(attempt)
                attempt.spans.end("preflight_s")
            supervisor.expect("the framework's setup did not end")
            work(attempt, scenario, supervisor, opened)
            code = succeed(attempt, supervisor)
            close(opened, clean=True)
        except Exception as error:  # every kind of failure becomes a row
            code = fail(error, attempt, supervisor)
            clear_frames(error)  # a setup that failed half-way has left its model in them
            close(opened, clean=False)
    return code


def dry_run(config: Config, job: Job, refusal: RunError | None) -> int:
    """Print the run as it would be; its exit code."""
    print(planned_run(config, job, refusal))
    if refusal is None:
        return 0
    print(f"ddlbench: {refusal.status}: {refusal}", file=sys.stderr)
    return refusal.exit_code


def time_limit(limit_s: float | None, started: float) -> tuple[float, str] | None:
    """When the run's own limit is reached (of perf_counter), and how the reason names it."""
    if limit_s is None:
        return None
    return started + limit_s, f"reached the time limit of {limit_s:g} s (train.time_limit_s)"


def connect_ranks(attempt: Attempt, supervisor: Supervisor) -> None:
    """Connect all ranks. From then on every rank watches for failures of the others."""
    config, device = attempt.config, attempt.device
    if device.type == "cuda":
        disable_nccl_abort()
    supervisor.expect(NO_CONNECTION, more_s=10)  # an error that `connect` raises has more details and comes before
    communicator = not getattr(config.framework, "own_communicators", False)
    timeout_s, reached = config.train.timeout_s, supervisor.reach
    connect(attempt.launch, device, timeout_s, config.backend, communicator=communicator, reached=reached)
    supervisor.connect()


def succeed(attempt: Attempt, supervisor: Supervisor) -> int:
    """Record the end of a complete run and return the exit code. Nothing is closed before, because closing may hang."""
    supervisor.expect_nothing()
    recorded = attempt.record_success()
    wait_for([0], "ddlbench/end")
    supervisor.leave()  # the rank that holds the store may now go first
    code = 0 if recorded else 1
    supervisor.expect_end(code)
    return code


def fail(error: Exception, attempt: Attempt, supervisor: Supervisor) -> int:
    """Record the failure that came first, of this rank or of another one; the exit code of this process."""
    rank = attempt.launch.rank
    mine = Failure.of(error, rank)
    first = supervisor.record_cause(mine)
    attempt.record_failure(first, begun=not isinstance(error, UserError))
    if first.rank == rank:
        complain(error, first)
        if first.status in INTERRUPTED and (line := how_to_continue(attempt)):
            print(f"ddlbench: {line}", file=sys.stderr, flush=True)
    supervisor.wait_for_readers(first)
    code = mine.exit_code if mine.status == first.status else PeerFailed.exit_code
    supervisor.expect_end(code)
    return code


def close(opened: ExitStack, clean: bool) -> None:
    """Close the data, drop the model and destroy the process groups, because they must not be destroyed while a wrapped
    model lives. The end is recorded: what goes wrong here changes nothing.

    clean: all ranks come here. Where another rank may still be in a collective, the program ends without `disconnect`.
    """
    try:
        opened.close()
        if clean or single_process():
            disconnect(clean)
    except Exception as error:
        said = f"{type(error).__name__} after the end of the run: {error}"
        print(f"ddlbench: warning: {said}", file=sys.stderr, flush=True)


def set_switches(train: Train, device: torch.device) -> None:
    """Set torch's global switches; measure/devices/environment.py records them."""
    if device.type == "cpu":
        torch.set_num_threads(train.threads_per_rank)
    else:  # torch's own default is TF32 for convolutions and fp32 for matrix products
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = train.tf32
        torch.backends.cudnn.benchmark = train.cudnn_benchmark is not False and not train.deterministic
    if train.deterministic:
        use_deterministic_algorithms()


def use_deterministic_algorithms() -> None:
    """Make every run on the same devices give the same bits; an operation without a deterministic algorithm ends the
    run. cuBLAS reads its variable at its first use, so this comes before any work on a device. A value that the user
    has set stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of the two values that CUDA's documentation names
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def check(config: Config, scenario: Scenario) -> Unsupported | Unavailable | None:
    """Everything that can be known before anything starts, the same on every rank. A UserError ends the program;
    what the framework or the loader cannot do is returned, because it becomes a row."""
    writable(config.results_dir)
    if config.checkpoint.every is not None and config.checkpoint.folder is not None:
        writable(str(config.checkpoint.folder), "checkpoint.dir")
    config.data.check(config.model, config.train.validate)
    if config.data.stage_to is not None:
        node_storage(config.data.stage_to)
    try:
        scenario.check()
        config.loader.check(config.data, config.model)
        if config.train.cold_cache:
            check_cold_cache(config.loader, config.data)
    except (Unsupported, Unavailable) as refusal:
        return refusal
    return None


def work(attempt: Attempt, scenario: Scenario, supervisor: Supervisor, opened: ExitStack) -> None:
    """The run itself, until all ranks have ended it. opened: closes the data, then the scenario"""
    opened.callback(scenario.close)
    place = scenario.setup()
    seed_replica(attempt.job, place)
    supervisor.expect("the data were not opened")
    feed = open_feed(attempt, place)
    opened.callback(feed.close)
    attempt.spans.end("setup_s")
    run = make_run(attempt, scenario, place, feed, supervisor)
    supervisor.expect("training did not begin")
    run.recorder.begin(run, attempt.spans.seconds, attempt.hosts)
    if attempt.device.type == "cpu":
        keep_freed_memory()
    supervisor.expect(NO_STEP)
    scenario.run(run)
    run.recorder.end(run, all_gather(feed.facts()))
    barrier()


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables of the functions that raised an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def complain(error: Exception, first: Failure) -> None:
    """Print the failure; with a traceback where it is not the user's mistake."""
    if not isinstance(error, RunError):
        traceback.print_exception(error)
    print(f"ddlbench: {first.status}: {printable(first.reason)}", file=sys.stderr, flush=True)
