"""A random campaign: runs of all families of frameworks in which random ranks are killed, stopped or signalled at
random times; then what was lost (aim: nothing) and what hung (aim: nothing).

    python -m tests.faults.chaos --minutes 10 --seed 1          # make chaos
    python -m tests.faults.chaos --seed 1 --only 17             # trial 17 of that campaign alone

Each trial follows from the seed and its number; only the machine's speed decides what a signal meets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from ddlbench.ranks.launchers import free_port, rank_variables
from ddlbench.record.files import HEARTBEAT
from ddlbench.results.reading.attempts import read
from ddlbench.sweep.state import State
from tests.support.libraries import why_no_horovod
from tests.support.processes import environment

FAMILIES = (
    "single", "ddp", "local_sgd", "parameter_server", "fsdp", "zero2", "tensor", "spatial", "gpipe", "hybrid",
    "pipedream", "horovod",
)  # fmt: skip
LAYOUTS = {
    "hybrid": ["framework.tp=2"],
    "parameter_server": ["framework.bound=2"],
    "spatial": ["model.image_size=64"],  # the last layer has a row for each rank
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SMALL = (
    "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32", "loader=synthetic",
    "train.global_batch=16", "train.steps=5", "train.epochs=200", "train.validate=false", "progress=false",
)  # fmt: skip
TIMEOUT_S = 15.0  # train.timeout_s: longer than a step or an import takes on a busy machine
ENDS_S = 60.0  # after the signal, on top of TIMEOUT_S: then it is a hang
LATEST_S = 20.0  # of the signal, after the first epoch was recorded; some come before any rank has connected


@dataclass(frozen=True)
class Trial:
    """whom: the ranks that get the signal; after_s: after the first record, or after the start where `early`"""

    number: int
    framework: str
    ranks: int
    signal: signal.Signals
    whom: tuple[int, ...]
    after_s: float
    early: bool

    def __str__(self) -> str:
        when = f"{self.after_s:.1f} s after the {'start' if self.early else 'first epoch'}"
        whom = ", ".join(map(str, self.whom))
        return f"trial {self.number}: {self.framework} x {self.ranks}, {self.signal.name} to rank {whom}, {when}"


@dataclass(frozen=True)
class Outcome:
    """status: of the record, "no record" where there is none; lost: what is missing or wrong, in words"""

    status: str
    codes: tuple[int | None, ...]
    seconds: float
    hung: bool
    lost: tuple[str, ...]


def trial(seed: int, number: int) -> Trial:
    draw = random.Random(f"{seed} {number}")
    families = [name for name in FAMILIES if name != "horovod" or why_no_horovod() is None]
    framework = families[number % len(families)]  # each in its turn
    ranks = 1 if framework == "single" else 2
    whom = tuple(range(ranks)) if draw.random() < 0.25 else (draw.randrange(ranks),)
    early = draw.random() < 0.25
    after_s = draw.uniform(0, 10.0) if early else draw.uniform(0, LATEST_S)
    return Trial(number, framework, ranks, draw.choice(SIGNALS), whom, after_s, early)


def start(planned: Trial, folder: Path, timeout_s: float) -> list[subprocess.Popen[bytes]]:
    words = [
        sys.executable, "-m", "ddlbench", f"+framework={planned.framework}", *SMALL, f"train.timeout_s={timeout_s}",
        f"results_dir={folder}", *LAYOUTS.get(planned.framework, []),
    ]  # fmt: skip
    port, outcomes = free_port(), list[subprocess.Popen[bytes]]()
    for rank in range(planned.ranks):
        log = (folder / f"rank-{rank}.log").open("wb")
        own = rank_variables(rank, planned.ranks, port)
        variables = environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""), **own)
        outcomes.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log, start_new_session=True))
        log.close()
    return outcomes


def epochs(folder: Path) -> int:
    """Whole lines of epochs.jsonl."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*/attempt-1/epochs.jsonl"))


def run(planned: Trial, folder: Path, timeout_s: float = TIMEOUT_S) -> Outcome:
    """timeout_s: after which a rank that does not answer is taken for dead"""
    ranks = start(planned, folder, timeout_s)
    try:
        if not planned.early:
            _wait(lambda: epochs(folder) > 0 or _all_ended(ranks), 300)
        time.sleep(planned.after_s)
        before, sent = epochs(folder), time.monotonic()
        for rank in planned.whom:
            if ranks[rank].poll() is None:
                ranks[rank].send_signal(planned.signal)
        others = [rank for number, rank in enumerate(ranks) if number not in planned.whom]
        if planned.signal == signal.SIGSTOP:  # the others must end by themselves, then the stopped ones
            hung = not _wait(lambda: _all_ended(others), timeout_s + ENDS_S)
            for number in planned.whom:
                ranks[number].send_signal(signal.SIGCONT)
            if len(planned.whom) == planned.ranks:  # stopped as a whole and going on: nothing is wrong with it
                ranks[0].send_signal(signal.SIGTERM)
            hung |= not _wait(lambda: _all_ended(ranks), timeout_s + ENDS_S)
        else:
            hung = not _wait(lambda: _all_ended(ranks), timeout_s + ENDS_S)
        seconds = time.monotonic() - sent
    finally:
        left = _end(ranks)
    return judge(folder, planned, tuple(rank.returncode for rank in ranks), before, seconds, hung, left)


def judge(
    folder: Path, planned: Trial, codes: tuple[int | None, ...], before: int, seconds: float, hung: bool, left: int
) -> Outcome:
    """What is wrong with what a trial has left. before: epochs that were on disk when the signal was sent."""
    lost = [f"{left} processes were left"] * (left > 0 and not hung)
    lost += ["every exit code is 0"] * (not any(codes))
    attempts = list(folder.glob("*/attempt-*"))
    if not attempts:
        lost += ["epochs were measured and there is no record"] * (before > 0)
        return Outcome("no record", codes, seconds, hung, tuple(lost))
    (path,) = attempts
    heartbeat = path / HEARTBEAT
    if heartbeat.exists():  # as a reader finds it half a minute later
        os.utime(heartbeat, (time.time() - 60, time.time() - 60))
    State(folder).refresh()
    attempt = read(path)
    status = str(attempt.record["status"])
    lost += [f"the status is {status}"] * (status in ("running", "unreadable", "ok", "unsupported"))
    lost += ["no reason is given"] * (not attempt.record.get("reason"))
    lost += [f"{before - len(attempt.epochs)} epochs are gone"] * (len(attempt.epochs) < before)
    lost += _steps(path, attempt.epochs[:before], planned.ranks)
    return Outcome(status, codes, seconds, hung, tuple(lost))


def _steps(path: Path, rows: Sequence[object], ranks: int) -> list[str]:
    if not rows:
        return []
    try:
        result = pd.read_parquet(path / "steps.parquet").groupby("epoch").size()
    except Exception as error:  # whatever it is, it is a loss
        return [f"steps.parquet cannot be read: {error!r}"[:200]]
    short = [epoch for epoch in range(len(rows)) if result.get(epoch, 0) != 5 * ranks]
    return [f"steps of epochs {short[:5]} are not complete"] * bool(short)


def _all_ended(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(rank.poll() is not None for rank in ranks)


def _wait(ready: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.1)
    return False


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Kill what is left of the sessions of all ranks; how many ranks had not ended."""
    left = sum(rank.poll() is None for rank in ranks)
    for rank in ranks:
        try:
            os.killpg(rank.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for rank in ranks:
        rank.wait()
    return left


def campaign(seed: int, minutes: float, only: int | None, keep: Path | None) -> int:
    """The number of trials that lost something or hung."""
    result, bad, deadline = Counter[str](), 0, time.monotonic() + 60 * minutes
    number = only or 0
    while time.monotonic() < deadline:
        planned = trial(seed, number)
        with TemporaryDirectory(dir=keep) as folder:
            outcome = run(planned, Path(folder))
            wrong = [*outcome.lost, *["HUNG"] * outcome.hung]
            codes = ", ".join(map(str, outcome.codes))
            print(f"{planned}: {outcome.status}, codes {codes}, {outcome.seconds:.1f} s", *wrong, sep="; ", flush=True)
            if wrong:
                bad += 1
                for log in sorted(Path(folder).glob("rank-*.log")):
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
        result["trials"] += 1
        result[outcome.status] += 1
        result["hung"] += outcome.hung
        result["with a loss"] += bool(outcome.lost)
        if only is not None:
            break
        number += 1
    print(f"seed {seed}: {json.dumps(result)}")
    return bad


def main() -> int:
    # A shell ignores the first for jobs in the background, nohup the second; the ranks would do so, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--folder", type=Path, help="where the trials' folders are made")
    given = parser.parse_args()
    return 1 if campaign(given.seed, given.minutes, given.only, given.folder) else 0


if __name__ == "__main__":
    sys.exit(main())
