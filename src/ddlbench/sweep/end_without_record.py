"""The row of a run that ended before it had a record (wrong data folder, failed import), from exit codes and output.

scripts/slurm/run.sbatch runs it after a run that failed (docs/adr/0032):

    python -m ddlbench.sweep.end_without_record CODE BEGAN WORDS... < OUTPUT
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddlbench.config.compose import configuration
from ddlbench.config.keys import added_later
from ddlbench.config.schema import Config
from ddlbench.errors import STATUSES, TIME_LIMIT, PeerFailed, RunError
from ddlbench.ranks.launchers import tasks_per_node
from ddlbench.record.record import Record, run_id
from ddlbench.sweep.plan import key_of
from ddlbench.sweep.state import JOB_VARIABLE, RESTARTS_VARIABLE, State

LIMIT = (128 + signal.SIGUSR1, -signal.SIGUSR1)  # exit codes of a rank, and of a process that was no rank yet
INTERRUPTS = {code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for code in (-number, 128 + number)}
BY_CODE = {status.exit_code: name for name, status in STATUSES.items() if status.exit_code not in INTERRUPTS}
SAID = re.compile(r"ddlbench(?: \(rank \d+\))?: (?!warning: |advice: |the record )(?:[a-z]+: )?(.+)")
SAID_BY_SLURM = re.compile(r"^(?:srun|slurmstepd): error: .+$", re.MULTILINE)
# srun's own exit code is the largest of all tasks, also of those that it ended itself: the first task counts.
TASK = re.compile(r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(\w+))", re.MULTILINE)
# The first word of what srun says of a task that a signal ended: "Out Of Memory"; "User defined signal 1" of a task
# that was still importing at the time limit.
BY_SIGNAL = {
    "Killed": 128 + signal.SIGKILL,
    "Terminated": 128 + signal.SIGTERM,
    "Out": STATUSES["oom"].exit_code,
    "User": 128 + signal.SIGUSR1,
}
LONGEST = 1000  # letters of a reason


def main(arguments: Sequence[str]) -> int:
    """Write the row of a run in this Slurm job, unless a rank has recorded it or a signal interrupted it.

    CODE: srun's exit code; BEGAN: when the run began, in the format of a record's times; WORDS: its command line
    """
    code, began, *words = arguments
    output = sys.stdin.buffer.read().decode(errors="replace")
    try:
        config = configuration(*words)
        tasks = tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"])
        key = key_of(config.identity(), sum(tasks))
        attempts = State(Path(config.results_dir)).refresh().attempts.values()
        if not any(attempt.key == key and attempt.start >= began for attempt in attempts):
            ends = ((int(rank), exited, by) for rank, exited, by in TASK.findall(output))
            codes = {rank: int(exited) if exited else BY_SIGNAL.get(by, 1) for rank, exited, by in ends}
            record_end(config, codes or {0: int(code)}, began, output, tasks)
    except (RunError, OSError):  # the run has printed it
        return 1
    return 0


def record_end(config: Config, codes: Mapping[int, int], began: str, output: str, tasks: Sequence[int]) -> bool:
    """Write a record without measurements for a run that left none; whether it is on disk. The status is that of the
    first rank that failed by itself. False for a run that a signal interrupted: its cell runs again.

    codes: exit codes by rank, of tasks that srun names together by the lowest one, in the order of their ends
    began: in the format of a record's times; output: the output of all ranks; tasks: the number of ranks of each node
    """
    code = next((code for code in codes.values() if code not in (0, PeerFailed.exit_code, *INTERRUPTS)), None)
    if code is None and INTERRUPTS.intersection(codes.values()):
        return False
    code = code or max(codes.values())
    status, ended_by = ("killed", TIME_LIMIT) if code in LIMIT else (BY_CODE.get(code, "error"), None)
    job = {name: os.environ[name] for name in (JOB_VARIABLE, RESTARTS_VARIABLE) if name in os.environ}
    content: dict[str, Any] = {
        "times": {"start": began, "end": None},
        "config": config.resolved,
        "config_added_later": added_later(config),
        "launch": {"world_size": sum(tasks), "nodes": len(tasks), "ranks_per_node": tasks[0]},
        "environment": {"variables": job},
        "dataset": {"name": config.data.name, "kind": config.data.kind},
    }
    # The first line in which ddlbench reported the end, else what else is known, and the exit codes.
    lines = [match[1] for line in output.splitlines() if (match := SAID.fullmatch(line.strip()))]
    exits = f"the run ended before it had a record: exit codes {', '.join(map(str, dict.fromkeys(codes.values())))}"
    signals = [f"rank {rank} received SIGUSR1" for rank, code in codes.items() if code in LIMIT]
    reason = "; ".join([*(lines or signals or SAID_BY_SLURM.findall(output))[:1], exits])[:LONGEST]
    name = run_id(config.identity(), sum(tasks), len(tasks), "unknown")
    return Record.open(config.results_dir, name, content).finish(status, reason, ended_by=ended_by)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
