"""Cells as Slurm jobs, through scripts/slurm/run.sbatch: the smallest of each configuration first."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlbench.errors import UserError, check_values
from ddlbench.heartbeat import server_time
from ddlbench.results.rows import group_by
from ddlbench.sweep.lock import FOLDER, claim, queue
from ddlbench.sweep.plan import Cell
from ddlbench.sweep.state import State, due
from ddlbench.sweep.study import Study
from ddlbench.texts import counted

PACKED = Path(__file__).parents[1] / "slurm_scripts"  # the wheel has its own copy
SCRIPTS = PACKED if PACKED.is_dir() else Path(__file__).parents[3] / "scripts" / "slurm"
SBATCH = re.compile(r"#SBATCH\s+(.*)")  # lines of a site's file that are options of sbatch
# Options by which the sweep knows its jobs and their order, and gives them the site's file and the folder of relative
# paths: --job-name, --dependency, --array, --wrap, --chdir, --wait and --export, which sbatch also takes abbreviated.
SET_HERE = re.compile("-[JdaDW]|--(j|dep|ar|wr|ch|wait$|exp(?!ort=ALL))")
# Variables of sbatch that say the same, and those of a job around this sweep.
NOT_OURS = re.compile("SBATCH_(EXPORT|WAIT$|ARRAY)|SLURM_MEM_PER_")
NEXT = "--next"  # between the cells of a job, for run.sbatch
LIMIT = "train.time_limit_s="
CORES = ("--cpus-per-task", "-c", "--cpus-per-gpu", "--exclusive")  # options that say how many cores a task gets
SIGNAL_S = 180  # Slurm signals the ranks 120 s before the time limit (run.sbatch); a minute more to start


@dataclass(frozen=True)
class Options:
    """site: DDLBENCH_SITE of run.sbatch; sbatch: further options of sbatch; throttle: most jobs at a time, 0 for no
    limit; pack: most cells in a job."""

    site: str | None = None
    sbatch: tuple[str, ...] = ()
    throttle: int = 0
    pack: int = 1

    def __post_init__(self) -> None:
        check_values("--", self, least={"throttle": 0, "pack": 1})

    def words(self) -> list[str]:
        """The options for sbatch: lines `#SBATCH ...` of the site's file, then the given ones, which win."""
        text = "" if self.site is None else _site_file(self.site).read_text(encoding="utf-8", errors="replace")
        lines = filter(None, map(SBATCH.match, text.splitlines()))
        try:
            words = [word for line in lines for word in shlex.split(line[1], comments=True)]
        except ValueError as error:
            raise UserError(f"--site {self.site}: a line #SBATCH has {str(error).lower()}: close it") from error
        words += self.sbatch
        if refused := next(filter(SET_HERE.match, words), None):
            raise UserError(
                f"{refused}: jobs of a sweep have its names, order, folder and environment: leave it out (allowed: "
                "--export=ALL,NAME=VALUE)"
            )
        return words


@dataclass(frozen=True)
class SlurmJob:
    """One job: its cells, all with the same GPU count. proves: whether it is the smallest cell of its configuration,
    which has to end well before the others start."""

    cells: tuple[Cell, ...]
    proves: bool


def jobs(cells: Sequence[Cell], pack: int) -> list[SlurmJob]:
    """The first cell of each configuration at its smallest GPU count, alone; then the others, small GPU counts first,
    in the order of the study, `pack` of one GPU count in a job."""
    by_size = sorted(cells, key=lambda cell: cell.gpus)
    smallest = [group[0] for group in group_by(by_size, lambda cell: cell.family).values()]
    plans = [SlurmJob((cell,), True) for cell in smallest]
    proofs = {cell.key for cell in smallest}
    others = [cell for cell in by_size if cell.key not in proofs]
    for group in group_by(others, lambda cell: cell.gpus).values():
        plans += [SlurmJob(tuple(group[start : start + pack]), False) for start in range(0, len(group), pack)]
    return plans


def job_lines(study: Study, cells: Sequence[Cell], options: Options) -> list[str]:
    """The jobs of these cells, a line for each kind, in the order in which they would be submitted. UserError for a GPU
    count that does not fill its nodes, and for a site that has no file."""
    more = options.words()
    planned = [(job.proves, len(job.cells), "sbatch", *_size(study, job.cells)) for job in jobs(cells, options.pack)]
    lines = [
        f"{count} jobs of {counted(size, 'cell')}{' that come first' * proves}: {shlex.join([*words, *more])}"
        for (proves, size, *words), count in Counter(planned).items()
    ]
    if lines and not any(word.startswith(CORES) for word in more):
        lines.append("no --cpus-per-task: a task gets its share of the cores that the job has on a node, perhaps one")
    return lines


def submit(study: Study, cells: Sequence[Cell], state: State, options: Options, retry: str | None) -> list[str]:
    """Submit the due cells that no sweep holds; a line for each job. UserError if Slurm refuses a job; the jobs before
    it are submitted."""
    more = options.words()
    (state.results / FOLDER).mkdir(parents=True, exist_ok=True)
    read_at, queued = server_time(state.results), queue()  # in this order, and before the records are read
    state.refresh()
    due_cells = [cell for cell in cells if due(state.status(cell), retry) and not cell.invalid]
    lines, numbers = list[str](), list[str]()
    proofs: dict[str, str] = {}  # job of the smallest cell of each configuration
    planned = jobs(due_cells, options.pack)
    for job in planned:
        _size(study, job.cells)  # raises before anything is submitted
    for job in planned:
        name = f"ddlbench-{study.name[:40].replace(' ', '_')}-{uuid.uuid4().hex[:12]}"  # no other job has it
        claims = [(cell, held) for cell in job.cells if (held := claim(state.results, cell.key, name, queued, read_at))]
        claimed = [cell for cell, _ in claims]
        if not claimed:
            continue
        # A job of one cell waits for the smallest cell of its configuration to end well; a job of several cells waits
        # for the end of all those. At most `throttle` jobs run at a time.
        before = {proofs[cell.family] for cell in claimed if cell.family in proofs and not job.proves}
        conditions = [f"{'afterany' if job.cells[1:] else 'afterok'}:{':'.join(sorted(before))}"] if before else []
        if options.throttle and len(numbers) >= options.throttle:
            conditions.append(f"afterany:{numbers[-options.throttle]}")
        waits = [f"--dependency={','.join(conditions)}", "--kill-on-invalid-dep=yes"] if conditions else []
        try:
            number = _sbatch(study, claimed, state.results, name, [*waits, *more], options)
        except UserError as error:
            # Where sbatch did not answer in time, Slurm may have the job: then `squeue` knows its name.
            if not isinstance(error.__cause__, subprocess.TimeoutExpired):
                for _, held in claims:
                    held.release()
            raise
        numbers.append(number)
        if job.proves:
            proofs[claimed[0].family] = number
        names = ", ".join(cell.name for cell in claimed)
        lines.append(f"job {number}: {len(claimed)} of {counted(claimed[0].gpus, 'GPU')}: {names}")
    return lines


def _sbatch(
    study: Study, cells: Sequence[Cell], results: Path, name: str, more: Sequence[str], options: Options
) -> str:
    """Submit one job; its number."""
    logs = results / FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    output = f"{str(logs).replace('%', '%%')}/%x-%j.out"
    command = ["sbatch", "--parsable", f"--job-name={name}", f"--output={output}", *_size(study, cells), *more]
    command.append(str(SCRIPTS / "run.sbatch"))
    for number, cell in enumerate(cells):
        command += [NEXT] * (number > 0) + cell.command(results)
        if len(cells) > 1 and not any(word.startswith(LIMIT) for word in cell.words):
            command.append(f"{LIMIT}{cell.limit_s}")  # that of the job is the sum: one cell must not use up the others'
    # The job needs the site's file, and its srun refuses the memory of a job in which this sweep runs, beside its own.
    env = {key: value for key, value in os.environ.items() if not NOT_OURS.match(key)}
    env |= {} if options.site is None else {"DDLBENCH_SITE": str(_site_file(options.site))}
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=120, check=True, env=env)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise UserError(
            f"sbatch refused a job of {counted(cells[0].gpus, 'GPU')} ({said}): {shlex.join(command[:8])} ..."
        ) from error
    return done.stdout.strip().partition(";")[0]


def _size(study: Study, cells: Sequence[Cell]) -> list[str]:
    gpus, per_node = cells[0].gpus, study.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise UserError(f"gpus={gpus} does not fill nodes of {per_node} GPUs: give gpus_per_node=N or other GPU counts")
    tasks = min(gpus, per_node)
    minutes = -(-int(sum(cell.limit_s for cell in cells) + SIGNAL_S) // 60)
    return [
        f"--nodes={gpus // tasks}",
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={tasks}",
        f"--time={minutes}",
    ]


def _site_file(site: str) -> Path:
    """The file of a site, from its name or from a path, which is a word with a slash."""
    folder = SCRIPTS / "site"
    path = Path(site).resolve() if "/" in site else folder / f"{site}.sh"
    if not path.is_file():
        sites = ", ".join(sorted(file.stem for file in folder.glob("*.sh")))
        raise UserError(f"--site {site}: there is no file {path}: give a path, or one of {sites}")
    return path
