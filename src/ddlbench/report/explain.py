"""`--explain RUN`: a waterfall from the ideal step of a run to its measured step, each bar with its evidence.

The ideal is the computing of the comparable measurement on one device, else the roofline (model FLOPs at the device's
peak). A profiled window divides the rest. Its rank with the least exposed communication is the one that waits least for
others, so its parts are those that the step has to take. They keep the seconds that they took in the window: what the
measured step has beyond them is unexplained, and negative if the profiler slowed the window down. An unknown bar is
empty. The bars sum to the step.

A cause is named if its bar, less what comparable runs usually have of it, is the largest, at least LEAST of the step,
larger than the spread of the other repeats, and larger than what is unexplained. What is unexplained in comparable
runs, too, is the time of the profiler. On the CPU a cause also has to exceed the share of the cores that other
processes took, because they may lengthen every bar.

A run that hung has no measured step: the ranks that are behind are named instead.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from ddlbench.config.choices import choices, published
from ddlbench.config.command_line import LABELS
from ddlbench.config.keys import Train, written
from ddlbench.errors import UserError
from ddlbench.figures.bars import draw_waterfall
from ddlbench.figures.figures import save
from ddlbench.figures.plotting import arrange, grid, style
from ddlbench.foreign import parse, read_bytes, section
from ddlbench.record.files import COLLECTIVES
from ddlbench.results.reading.attempts import Records
from ddlbench.results.rows import OWN, Row, latest, wait_column, without_data_wait
from ddlbench.results.tables.checks import straggler
from ddlbench.results.tables.measurement import duration
from ddlbench.results.tables.merge import flatten
from ddlbench.results.tables.tables import Tables, write_csv
from ddlbench.texts import aligned, first_few, percent

NO_CAUSE = "no single cause"
LEAST = 0.1  # share of a step
ALWAYS: tuple[str, ...] = ("exposed communication", "bubble", "host and launch")  # bars that runs without a defect have
ALONE = 1 / 3  # share of a step that these have to exceed where no comparable run says what is usual
# Bars that are compared with those of comparable runs; in a window these have the time of the profiler, too. The other
# bars are a defect even if all runs have them.
COMPARED = (*ALWAYS, "kernels", "unexplained")
ALIKE = (
    "origin", "status", "mode", "framework", "model", "model_changed", "gpus", "nodes", "device_model", "global_batch",
    "precision",
)  # fmt: skip
PARTS = ("compute_s", "exposed_s", "idle_s")  # of a rank in a profiled window
RANKS_SHOWN = 8  # of a group that hung
# The bars that may be a cause, and what the next run changes to decide.
NEXT = {
    "kernels": "profile=true profile_trace=true",
    "input": "loader=synthetic",
    "exposed communication": "train.reduce_dtype=bf16",
    "slow rank": "preflight=true",
    "bubble": "train.micro_batch=1",
    "host and launch": "profile=true profile_trace=true",
    "unexplained": "profile=true profile_trace=true",
}


@dataclass(frozen=True)
class Bar:
    """One bar. seconds: of a step, None: unknown; share: of the measured step; next_run: a command line"""

    bar: str
    seconds: float | None
    evidence: str = ""
    share: float | None = None
    next_run: str = ""


@dataclass(frozen=True)
class Explanation:
    """run: its path; step_s: measured seconds of a step, the sum of the bars; cause: a bar's name, or NO_CAUSE"""

    run: str
    step_s: float
    bars: Sequence[Bar]
    cause: str

    def write(self, out: Path, pdf: bool = False) -> None:
        """tables/explain.csv and figures/explain.* below `out`."""
        (out / "tables").mkdir(parents=True, exist_ok=True)
        write_csv(pd.DataFrame(map(asdict, self.bars)).convert_dtypes(), out / "tables" / "explain.csv")
        with style():
            figure = grid([(f"cause: {self.cause}", [f"a step takes {duration(self.step_s)}", self.run])])
            draw_waterfall(figure.axes[0], {bar.bar: bar.seconds for bar in self.bars}, self.step_s)
            arrange(figure)
        save(out / "figures", "explain", figure, pdf)

    def lines(self) -> list[str]:
        cells = [
            [bar.bar, "" if bar.seconds is None else f"{bar.seconds:.6f}", percent(bar.share), bar.evidence]
            for bar in self.bars
        ]
        runs = [f"to decide {bar.bar}: {bar.next_run}" for bar in self.bars if bar.next_run]
        table = aligned(("bar", "seconds", "share", "evidence"), cells, ("bar", "evidence"))
        return [f"{self.run}: a step takes {duration(self.step_s)}; cause: {self.cause}", "", *table, "", *runs]


def explain(tables: Tables, records: Records, name: str) -> Explanation:
    """The waterfall of the run with this run_id (its last attempt) or path. UserError if it has no measured step."""
    runs = [row for row in tables.run_rows if name in (row["run_id"], row["path"])]
    if not runs:
        raise UserError(f"--explain {name}: no attempt has this run_id or path: take one of column run_id of runs.csv")
    run = latest(runs)
    if run["origin"] != OWN:
        raise UserError(f"--explain {name}: a published measurement has no record of its steps: choose an own run")
    alike = [row for row in tables.run_rows if row["throughput_samples_per_s"] and all(row[k] == run[k] for k in ALIKE)]
    attempts = records.named({row["path"] for row in (run, *alike)})
    if run["status"] == "timeout" and (ranks := behind(attempts[run["path"]].path)):
        raise UserError(f"--explain {name}: it hung: {ranks}")
    counts = (run["throughput_samples_per_s"], run["gpus"], run["global_batch"])
    if run["status"] != "ok" or run["mode"] != "train" or not all(counts):
        raise UserError(f"--explain {name}: no training step is measured (status {run['status']}): choose another run")
    ideal = _ideal(tables, run)
    windows = {row["path"]: _window(attempts[row["path"]].record) for row in alike}
    window = windows[run["path"]]
    bars = _bars(run, window, ideal)
    # A window divides a step in another way than the ranks' own steps do.
    others = [row for row in alike if row is not run and bool(windows[row["path"]]) == bool(window)]
    comparable = [_bars(row, windows[row["path"]], ideal) for row in others]
    step_s, config = _step_s(run), section(attempts[run["path"]].record, "config")
    shown = [
        replace(bar, share=bar.seconds and bar.seconds / step_s, next_run=_next_run(bar, config, run)) for bar in bars
    ]
    return Explanation(run["path"], step_s, shown, _cause(bars, run, alike, comparable))


def behind(attempt: Path) -> str:
    """Each group of a run that hung whose ranks are not at the same collective, in words, the lowest number first; ""
    if no rank saved its last collectives. UserError for a file that cannot be read.

    All ranks of a process group begin its collectives in the same order: the others wait for the rank with the lowest
    sequence number. Numbers of two groups, or of two backends of one group, are not comparable, and a message has a
    number on each of its two ranks.
    """
    groups = defaultdict[str, dict[int, tuple[int, str]]](dict)  # by rank: the last line of a rank counts
    for file in sorted((attempt / COLLECTIVES).glob("rank-*.json")):
        try:
            saved = parse(read_bytes(file))
            rank = saved["rank"]
            for line in saved["collectives"]:
                if not line["message"]:
                    group = f"{line['group']} of {line['operation'].partition(':')[0]}"
                    text = f"rank {rank} on {saved['host']} last began {line['operation']} {line['sequence']}"
                    groups[group][rank] = (line["sequence"], text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} holds no last collectives ({error!r}): remove it") from error
    lines = list[str]()
    for group, ranks in groups.items():
        numbers, texts = zip(*sorted(ranks.values()), strict=True)
        if numbers[0] != numbers[-1]:
            last = "; ".join(first_few(texts, RANKS_SHOWN, "more ranks"))
            lines.append(f"{numbers.count(numbers[0])} of {len(ranks)} ranks behind in group {group}: {last}")
    return "; ".join(lines) or ("all ranks began the same last collectives" if groups else "")


def _step_s(run: Row) -> float:
    return run["global_batch"] / run["throughput_samples_per_s"]


def _window(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ranks of the profiled window with the seconds of a step; empty without one, or where a key is missing."""
    profile = section(record, "profile")
    try:
        return [
            {"rank": line["rank"], "stage": line["stage"], **{part: line[part] / profile["steps"] for part in PARTS}}
            for line in (profile["ranks"] if profile.get("status") == "ok" else [])
        ]
    except (KeyError, TypeError, ZeroDivisionError):
        return []


def _ideal(tables: Tables, run: Row) -> Bar:
    """Computing of the base on one device for one rank's part of the batch, else the roofline. A run on one device is
    no base of itself."""
    timed = [row for row in tables.scaling_rows if row["gpus"] == 1 and row["sample_time_s"]]
    bases = {(row["framework"], row["sample_time_s"]): row for row in timed}
    for row in tables.scaling_rows if run["gpus"] > 1 else []:
        for name in ("own_base", "best_single"):
            base = bases.get((row[f"{name}_framework"], row[f"{name}_sample_time_s"]))
            if base and row["measurement"] == run["measurement"]:
                sample_s = without_data_wait(base["sample_time_s"], base.row)
                evidence = f"sample_time_s of {base['framework']} on one device less its {wait_column(base.row)}"
                return Bar("ideal", sample_s * run["global_batch"] / run["gpus"], evidence)
    if run["mfu"]:
        return Bar("ideal", run["mfu"] * _step_s(run), "roofline: mfu x step")
    return Bar("ideal", None, "no comparable run on one device, and no peak of the device")


def _bars(run: Row, window: Sequence[Mapping[str, Any]], ideal: Bar) -> list[Bar]:
    """All bars; their seconds sum to the step."""
    step_s, wait, retries = _step_s(run), run[wait_column(run)], run["allocator_retries"]
    evidence, (compute, exposed, idle, excess) = _parts(run, window)
    bubble = None if run["bubble"] is None else without_data_wait(run["bubble"] * step_s, run)
    if exposed is not None and bubble is not None:  # a stage that waits for another waits in communication
        bubble = min(bubble, exposed)
        exposed -= bubble
    kernels = None if compute is None else compute - (ideal.seconds or 0.0)
    if kernels is not None and idle is not None and ideal.seconds is not None:
        of_base = min(max(-kernels, 0.0), idle)  # the base's seconds contain its own idle time
        kernels, idle = kernels + of_base, idle - of_base
    name = "computing" if ideal.seconds is None else "kernels"
    slow = f"{straggler(run)}: its work above the others' median; {evidence}"
    bars = [
        ideal,
        Bar(name, kernels, evidence if ideal.seconds is None else f"{evidence}, less the ideal"),
        Bar("input", None if wait is None else wait * step_s, wait_column(run)),
        Bar("exposed communication", exposed, f"{evidence}; its kinds are not recorded"),
        Bar("slow rank", excess, "straggler_rank is empty" if excess is None else slow),
        Bar("bubble", bubble, "bubble x the step without its wait for data"),
        Bar("host and launch", idle, f"idle, less that of the base: {evidence}"),
        Bar("allocator", None, f"allocator_retries: {retries}; their seconds are not recorded" if retries else ""),
    ]
    rest_s = step_s - sum(bar.seconds or 0.0 for bar in bars)
    return [*bars, Bar("unexplained", rest_s, "the step less the other bars")]


def _parts(run: Row, window: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[float | None, ...]]:
    """The evidence, and seconds of a step, None: unknown: computing, exposed communication and idle time of the rank
    that waits least for others, where a slow rank has those of the other ranks of its stage; then what a slow rank
    takes beyond them."""
    late = run["straggler_rank"]
    if not window:
        compute, slowest = run["own_step_median_rank_s"], run["own_step_s"]
        excess = None if None in (late, slowest, compute) else slowest - compute
        evidence = f"own_step_median_rank_s ({run['own_step_source']})" if slowest else "no profiled window"
        return evidence, (compute, None, None, excess)
    rank = min(window, key=lambda line: line["exposed_s"])
    compute, exposed, idle = (rank[part] for part in PARTS)
    evidence = f"profiled window, rank {rank['rank']}"
    others = [line for line in window if line["stage"] == rank["stage"] and line is not rank]
    if rank["rank"] != late or not others:
        return evidence, (compute, exposed, idle, None)
    took, (compute, idle) = compute + idle, (median(line[part] for line in others) for part in ("compute_s", "idle_s"))
    excess = took - compute - idle
    # A slow core is as slow where it communicates.
    waits = exposed * excess / took if took and run["device"] == "cpu" else 0.0
    return evidence, (compute, exposed - waits, idle, excess + waits)


def _cause(bars: Sequence[Bar], run: Row, alike: Sequence[Row], comparable: Sequence[Sequence[Bar]]) -> str:
    """The cause by the rules above: a bar's name, or NO_CAUSE.

    alike: comparable runs, the repeats among them; comparable: the bars of those that have a profiled window, if the
        run has one, else of those that have none
    """
    step_s = _step_s(run)
    usual: dict[str, float] = dict.fromkeys(ALWAYS, (ALONE - LEAST) * step_s)
    for name in COMPARED:
        seconds = [bar.seconds for bars in comparable for bar in bars if bar.bar == name and bar.seconds is not None]
        if seconds:
            usual[name] = median(seconds)
    repeats = [_step_s(row) for row in alike if row is not run and row["measurement"] == run["measurement"]]
    busy = (run["cpu_others_share"] or 0.0) if run["device"] == "cpu" else 0.0
    least_s = max(max(LEAST, busy) * step_s, max(repeats, default=0.0) - min(repeats, default=0.0))
    *explained, unexplained = bars
    above = {bar: (bar.seconds or 0.0) - usual.get(bar.bar, 0.0) for bar in explained if bar.bar in NEXT}
    largest = max(above, key=lambda bar: above[bar])
    usual_s = usual.get("unexplained", 0.0) if largest.bar in COMPARED else 0.0
    if above[largest] <= max(abs((unexplained.seconds or 0.0) - usual_s), least_s):
        return NO_CAUSE
    return f"slow {straggler(run)}" if largest.bar == "slow rank" else largest.bar


def _next_run(bar: Bar, config: Mapping[str, Any], run: Row) -> str:
    """The command line of the run with the changes of NEXT: its choices, and the keys of these and of `train` that have
    other values than by default. Each key is there once, because Hydra refuses a choice that is given twice."""
    if bar.bar not in NEXT or not bar.seconds:
        return ""
    changed = dict(change.split("=") for change in NEXT[bar.bar].split())
    if run["device"] == "cpu" and "train.reduce_dtype" in changed:
        changed["train.reduce_dtype"] = "fp16"  # gloo cannot sum bf16
    groups = ("+framework", "+model", "loader", "data", "recipe")
    words = {group: name for group in groups if (name := section(config, group.strip("+")).get("name"))}
    options = {group.strip("+"): name for group, name in words.items() if group not in changed}
    usual = {group: published(group, name) for group, name in options.items() if name in choices(group)}
    defaults = flatten({"train": vars(Train()), **usual})
    given = flatten({name: section(config, name) for name in ("train", *usual)})
    # A record also has what cannot be set, such as the kind of a model.
    settable = {key: value for key, value in given.items() if key in defaults and key not in LABELS}
    words |= {key: written(value) for key, value in settable.items() if value != defaults[key]}
    words = {key: value for key, value in words.items() if key not in changed} | changed
    gpus, nodes = run["gpus"], run["nodes"] or 1
    launcher = f"torchrun --nproc-per-node={gpus}" if gpus > 1 else "python"
    if nodes > 1:
        launcher = f"srun --nodes={nodes} --ntasks-per-node={gpus // nodes} python"
    return " ".join([launcher, "-m ddlbench", *(shlex.quote(f"{key}={value}") for key, value in words.items())])
