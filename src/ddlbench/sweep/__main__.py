"""`python -m ddlbench.sweep STUDY`: plan the cells of a study, run what is missing, show how far it is."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlbench.command import ended
from ddlbench.errors import UserError
from ddlbench.oracle.machine import machine as machines
from ddlbench.sweep import slurm
from ddlbench.sweep.lock import Owner, holder, last_claim, queue
from ddlbench.sweep.plan import INVALID, Cell, Check, data_check, plan
from ddlbench.sweep.state import FINAL, HELD, RETRIES, Overview, State, due
from ddlbench.sweep.study import load, names
from ddlbench.texts import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if --local leaves cells that this machine may run failed or missing, or if cells are held that
    --cancel or a start cannot have; 2 for errors of the user, 130 after Ctrl-C."""
    given = _parser().parse_intermixed_args(arguments)
    again = f"python -m ddlbench.sweep {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    interrupted = f"interrupted; cells that have ended are kept; to continue: {again}"
    return ended("ddlbench.sweep", lambda: _run(given), interrupted)


def _run(given: argparse.Namespace) -> int:
    if given.study is None:
        say(*(f"{name:24} {title}" for name, title in names().items()))
        return 0
    study = load(given.study, given.words)

    import torch  # not above: a mistake in the study is reported before

    from ddlbench.measure.formulas.flops import check_precision
    from ddlbench.record.record import writable
    from ddlbench.sweep import local

    options = slurm.Options(given.site, given.sbatch, given.throttle, given.pack)
    sbatch = options.words()  # a mistake in them is an error of every command, also of one that submits nothing
    if given.local and options != slurm.Options():
        raise UserError("--local ignores --site, --sbatch, --throttle and --pack: leave them out, or choose --slurm")
    cancels, starts = given.cancel and not given.dry_run, (given.slurm or given.local) and not given.dry_run
    mode = "cancel" if cancels else "status" if given.status else "start" if starts else "plan"
    on_gpus = "--gpus-per-node=0" not in sbatch if given.slurm else torch.cuda.is_available()
    device, machine, checks = "cuda" if on_gpus else "cpu", None, list[Check]()
    if mode == "plan" and given.cluster is not None:
        machine = machines.load(given.cluster)
        device, name = machine.device.type, machine.device.name
        checks.append(lambda config: check_precision(config.train.precision, name))
    if mode == "start" or (mode == "plan" and given.dry_run):
        checks.append(data_check(here=given.local))
    cells = plan(study, torch.device(device), *checks)
    state = State(Path(study.results_dir)).refresh()
    if mode == "cancel":
        return _cancel(cells, state)
    if mode != "status" and (given.slurm or given.local):
        writable(study.results_dir)
    if mode != "start":
        overview = Overview(cells, state, queue(), machine)
        lines = overview.status_lines() if mode == "status" else overview.plan_lines()
        if mode == "plan" and given.slurm:
            statuses = [(cell, overview.statuses[cell.key]) for cell in cells if not cell.invalid]
            left = [cell for cell, status in statuses if due(status, given.retry) and status not in HELD]
            lines += slurm.job_lines(study, left, options)
        elif mode == "plan" and given.local:
            lines += local.too_large(cells)
        if mode == "plan" and (given.resume or given.retry) and not given.dry_run:
            lines.append("nothing was started: give --local or --slurm, too")
        say(*lines)
        return 0
    failed = False
    if given.slurm:
        say(*slurm.submit(study, cells, state, options, given.retry) or ["nothing to submit"])
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        local.run_cells(cells, state, given.retry, say)
        overview = Overview(cells, state.refresh(), queue())
        startable = [overview.statuses[cell.key] for cell in cells if cell.gpus <= local.most_ranks()]
        failed = any(status not in (*FINAL, *HELD, INVALID) for status in startable)
        say(*overview.status_lines(), *local.too_large(cells))
        say(f"report: python -m ddlbench.report {shlex.quote(study.results_dir)}")
    if left_out := sum(cell.invalid for cell in cells):
        say(f"{left_out} cells cannot run: --dry-run shows why")
    still_due = (cell for cell in cells if due(state.status(cell), given.retry) and not cell.invalid)
    claims = [last_claim(state.results, cell.key) for cell in still_due]
    unreadable = [path for path, owner in claims if path and owner is None]
    for path in unreadable:
        say(f"{path} holds a cell, but no sweep has written it: remove it, or start again after two minutes")
    return 1 if unreadable or failed else 0


def _cancel(cells: Sequence[Cell], state: State) -> int:
    """End the Slurm jobs that hold cells of this study, and the sweeps on this machine. Exit code 1 if one is left, of
    another user or on another machine."""
    queued = queue()
    owners = {owner for cell in cells if (owner := holder(state.results, cell.key, queued))}
    jobs = {owner.job for owner in owners if owner.job}
    sweeps = {(owner.place, owner.pid) for owner in owners if not owner.job}
    cancelled, ended = set[str](), set[tuple[str, int]]()
    for name in sorted(jobs):
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # of another user
            subprocess.run(["scancel", f"--name={name}"], check=True, timeout=60)
            cancelled.add(name)
    for place, pid in sweeps:
        if place == Owner.this().place:
            with contextlib.suppress(OSError):  # of another user, or it has just ended
                os.kill(pid, signal.SIGTERM)  # a shell's background processes ignore SIGINT
                ended.add((place, pid))
    say(f"cancelled: {len(cancelled)} Slurm jobs, {len(ended)} local sweeps")
    if left := len(jobs - cancelled) + len(sweeps - ended):
        say(f"{left} of other users or machines still hold cells of this study: cancel them there")
    return 1 if left else 0


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).lower()}: close it") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddlbench.sweep", description=__doc__)
    parser.add_argument("study", nargs="?", metavar="STUDY", help="name or YAML file; without one: lists the studies")
    parser.add_argument("words", nargs="*", metavar="key=value", help="values of an axis, keys of a study or of a run")
    parser.add_argument("--dry-run", action="store_true", help="show the cells and start nothing, as without an option")
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="--dry-run: seconds of what has not run, predicted for a machine that cluster= of ddlbench.predict names",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="run what is missing on this machine, one after another")
    where.add_argument("--slurm", action="store_true", help="submit what is missing, the smallest cells first")
    parser.add_argument("--site", help="--slurm: file to source first, or NAME of scripts/slurm/site/NAME.sh")
    parser.add_argument(
        "--sbatch", type=_words, default=(), metavar="OPTIONS", help="--slurm: further options, in one word"
    )
    parser.add_argument("--throttle", type=int, default=0, metavar="N", help="--slurm: at most N jobs at a time")
    parser.add_argument("--pack", type=int, default=1, metavar="N", help="--slurm: up to N cells of one size in a job")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--cancel", action="store_true", help="end the jobs and the local sweeps of this study")
    instead.add_argument("--status", action="store_true", help="how many cells are done, failed, running: starts none")
    parser.add_argument("--resume", action="store_true", help="run only what is missing: always so")
    parser.add_argument("--retry", choices=list(RETRIES), help="run cells again that failed; those that are ok never")
    return parser


if __name__ == "__main__":
    sys.exit(main())
