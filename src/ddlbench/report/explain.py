"""`--explain RUN`: a waterfall from the ideal step of a run to its measured step, each bar with its evidence.

The ideal is the computing of the comparable measurement on one device, else the roofline (model FLOPs at the device's
peak). A profiled window divides the rest. Its rank with the least exposed communication is the one that waits least for
others, so its parts are those that the step has to take. They keep the seconds that they took in the window: what the
measured step has beyond them is unexplained, less than nothing where the profiler slowed the window down. An unknown
bar is empty. The bars sum to the step.

A cause is named if its bar, less what comparable runs usually have of it, is the largest, at least LEAST of the step,
larger than the spread of the other repeats, and larger than what is unexplained. What other processes took of a CPU
may lengthen every bar that computes or waits for a rank that does: such a bar has to exceed that share too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ddlbench.errors import UserError
from ddlbench.figures.files import save
from ddlbench.measure.straggler import own_steps_of_window, straggler
from ddlbench.report.hung import behind
from ddlbench.results.reading.attempts import Records
from ddlbench.results.rows import Row
from ddlbench.results.tables.measurement import Measurement, duration
from ddlbench.results.tables.tables import Tables, write_csv
from ddlbench.texts import aligned, percent

LEAST = 0.1  # share of a step
ALONE = 1 / 3  # share of a step that exposed communication has to exceed where no comparable run says what is usual
CHUNKS = 4  # micro batches a stage, with which a pipeline has its usual bubble (Huang et al. 2019, section 2.3)
ALIKE = ("framework", "model", "model_changed", "gpus", "nodes", "device_model", "global_batch", "precision", "mode")
BUSY = ("kernels", "exposed communication", "slow rank", "bubble", "host and launch")  # longer where a core is shared
NO_CAUSE = "no single cause"
CHOICES = ("loader", "data", "recipe")
KEPT = ("global_batch", "micro_batch", "precision", "epochs", "steps", "threads_per_rank")  # of `train`
# The bars that may be a cause, and what the next run changes to decide.
NEXT = {
    "kernels": "profile=true",
    "input": "loader=synthetic",
    "exposed communication": "train.reduce_dtype=bf16",
    "slow rank": "preflight=true",
    "bubble": "train.micro_batch=1",
    "host and launch": "profile=true profile_trace=true",
    "unexplained": "profile=true",
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
        save(out / "figures", "explain", self._figure(), pdf)

    def lines(self) -> list[str]:
        cells = [
            [bar.bar, "" if bar.seconds is None else f"{bar.seconds:.6f}", percent(bar.share), bar.evidence]
            for bar in self.bars
        ]
        runs = [f"to decide {bar.bar}: {bar.next_run}" for bar in self.bars if bar.next_run]
        table = aligned(("bar", "seconds", "share", "evidence"), cells, ("bar", "evidence"))
        return [f"{self.run}: a step takes {duration(self.step_s)}; cause: {self.cause}", "", *table, "", *runs]

    def _figure(self) -> Figure:
        shown = [bar for bar in self.bars if bar.seconds is not None]
        seconds = [bar.seconds or 0.0 for bar in shown]
        begins = [sum(seconds[:n]) for n in range(len(seconds))]
        figure = Figure((6, 3), layout="constrained")
        axes = figure.subplots()
        axes.barh([bar.bar for bar in shown], seconds, left=begins)
        axes.axvline(self.step_s, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        return figure


def explain(tables: Tables, records: Records, name: str) -> Explanation:
    """The waterfall of the run with this run_id (its last attempt) or path. UserError if it has no measured step."""
    runs = [row for row in tables.run_rows if name in (row["run_id"], row["path"])]
    if not runs:
        raise UserError(
            f"--explain {name}: no attempt has this run_id or path: take one of the column run_id of runs.csv"
        )
    run = runs[-1]
    path = next(attempt.path for attempt in records.attempts if attempt.name == run["path"])
    if run["status"] == "timeout" and (ranks := behind(path)):
        raise UserError(f"--explain {name}: it hung; the last collective of each rank, the first is behind: {ranks}")
    if run["status"] != "ok" or run["mode"] != "train" or not run["throughput_samples_per_s"] or not run["gpus"]:
        raise UserError(
            f"--explain {name}: it has no measured training step (status {run['status']}): choose another run"
        )
    record_of = {attempt.name: attempt.record for attempt in records.attempts}
    rows = [row for row in tables.measurements if row["measurement"] == run["measurement"]]
    step_s = _step_s(run)
    ideal = _ideal(tables, run, rows)
    bars = _bars(run, step_s, _window(record_of[run["path"]]), ideal)
    bars.append(Bar("unexplained", step_s - sum(bar.seconds or 0.0 for bar in bars), "the step less the other bars"))
    others = [row for row in tables.run_rows if row is not run and row["status"] == "ok" and _alike(row, run)]
    stages = 1 + max((line["stage"] for line in _window(record_of[run["path"]]).get("ranks", [])), default=0)
    usual = _usual(step_s, stages, [_bars(row, _step_s(row), _window(record_of[row["path"]]), ideal) for row in others])
    cause = _cause(bars, usual, _thresholds(run, [row for row in others if row["measurement"] == run["measurement"]]))
    command = _command(record_of[run["path"]]["config"], run["gpus"])
    bars = [replace(bar, share=None if bar.seconds is None else bar.seconds / step_s) for bar in bars]
    return Explanation(run["path"], step_s, [replace(bar, next_run=_next(bar, command)) for bar in bars], cause)


def _step_s(run: Row) -> float:
    return run["global_batch"] / run["throughput_samples_per_s"]


def _window(record: Mapping[str, Any]) -> Mapping[str, Any]:
    profile: Mapping[str, Any] = record.get("profile") or {}
    return profile if profile.get("status") == "ok" else {}


def _alike(row: Row, run: Row) -> bool:
    return bool(row["throughput_samples_per_s"]) and all(row[name] == run[name] for name in ALIKE)


def _ideal(tables: Tables, run: Row, rows: Sequence[Measurement]) -> Bar:
    """Computing of the base on one device for one rank's part of the batch, else the roofline. A run on one device is
    no base of itself."""
    for row in rows if run["gpus"] > 1 else []:
        for base, framework in (
            (row.base(own=True), row["own_base_framework"]),
            (row.base(own=False), row["best_single_framework"]),
        ):
            if base and base.gpus == 1:
                waits = [
                    one["data_wait_share"] or 0.0
                    for one in tables.scaling_rows
                    if (one["gpus"], one["framework"], one["sample_time_s"]) == (1, framework, base.seconds)
                ]
                share = waits[0] if waits else 0.0
                seconds = base.seconds * (1 - share) * run["global_batch"] / run["gpus"]
                return Bar("ideal", seconds, f"sample_time_s of {framework} on one device less its data_wait_share")
    if run["mfu"]:
        return Bar("ideal", run["mfu"] * run["global_batch"] / run["throughput_samples_per_s"], "roofline: mfu x step")
    return Bar("ideal", None, "no comparable run on one device, and no peak of the device")


def _bars(run: Row, step_s: float, window: Mapping[str, Any], ideal: Bar) -> list[Bar]:
    """All bars but `unexplained`."""
    ranks: Sequence[Mapping[str, float]] = window.get("ranks", [])
    wait = run["data_wait_share"]
    rest_s = step_s * (1 - (wait or 0.0))
    data = Bar("input", None if wait is None else wait * step_s, "data_wait_share")
    compute = exposed = idle = excess = None
    late, evidence = run["straggler_rank"], "no profiled window"
    if ranks:
        rank = min(ranks, key=lambda line: line["exposed_s"])
        scale = 1 / window["steps"]
        evidence = f"profiled window, rank {rank['rank']}"
        exposed, compute, idle = (rank[part] * scale for part in ("exposed_s", "compute_s", "idle_s"))
        slow = straggler(own_steps_of_window(window))
        if slow is not None and slow.rank == rank["rank"]:
            others = [one for one in ranks if one["stage"] == slow.stage and one["rank"] != slow.rank]
            own = compute + idle
            compute, idle = (median(one[part] for one in others) * scale for part in ("compute_s", "idle_s"))
            excess = own - compute - idle
    elif run["own_step_s"]:
        compute, evidence = run["own_step_median_rank_s"], f"own_step_median_rank_s ({run['own_step_source']})"
        excess = run["own_step_s"] - compute if late is not None else None
    bubble = None if run["bubble"] is None else run["bubble"] * rest_s
    if exposed is not None and bubble is not None:  # a stage that waits for another waits in communication
        bubble = min(bubble, exposed)
        exposed -= bubble
    kernels = None if compute is None else compute - (ideal.seconds or 0.0)
    name = "kernels" if ideal.seconds is not None else "computing"
    if kernels is not None and idle is not None and ideal.seconds is not None:
        of_base = min(max(-kernels, 0.0), idle)  # the base's seconds contain its own idle time
        kernels, idle = kernels + of_base, idle - of_base
    rank_name = f"rank {late} on {run['straggler_host']}: own step above the others' median; {evidence}"
    retries = run["allocator_retries"]
    return [
        ideal,
        Bar(name, kernels, f"{evidence}, less the ideal" if ideal.seconds is not None else evidence),
        data,
        Bar("exposed communication", exposed, f"{evidence}; its kinds are not recorded"),
        Bar("slow rank", excess, rank_name if excess is not None else "straggler_rank is empty"),
        Bar("bubble", bubble, "bubble x the step without its wait for data"),
        Bar("host and launch", idle, f"idle, less that of the base: {evidence}"),
        Bar(
            "allocator",
            None,
            "" if retries is None else f"allocator_retries: {retries}; their seconds are not recorded",
        ),
    ]


def _usual(step_s: float, stages: int, comparable: Sequence[Sequence[Bar]]) -> dict[str, float]:
    """Seconds that runs of this framework and batch have of each bar: the median of comparable ones, else a rule."""
    usual: dict[str, float] = {}
    for name in ("kernels", "exposed communication", "bubble"):
        seconds = [bar.seconds for bars in comparable for bar in bars if bar.bar == name and bar.seconds is not None]
        if seconds:
            usual[name] = median(seconds)
        elif name == "exposed communication":
            usual[name] = (ALONE - LEAST) * step_s
        elif name == "bubble" and stages > 1:
            usual[name] = step_s * (stages - 1) / ((CHUNKS + 1) * stages - 1)
    return usual


def _thresholds(run: Row, repeats: Sequence[Row]) -> dict[str, float]:
    """Seconds that each bar has to exceed. repeats: the others"""
    steps = [_step_s(row) for row in repeats]
    least = max(LEAST * _step_s(run), max(steps) - min(steps) if steps else 0.0)
    others = (run["cpu_others_share"] or 0.0) * _step_s(run) if run["device"] == "cpu" else 0.0
    return {name: max(least, others) if name in BUSY else least for name in NEXT}


def _cause(bars: Sequence[Bar], usual: Mapping[str, float], thresholds: Mapping[str, float]) -> str:
    """The bar that is largest above the usual, if it exceeds its threshold and what is unexplained."""
    seconds = {bar.bar: (bar.seconds or 0.0) - usual.get(bar.bar, 0.0) for bar in bars if bar.bar in NEXT}
    if bars[0].seconds is None:  # how much idle time is normal, only an ideal says
        del seconds["host and launch"]
    unexplained = abs(seconds.pop("unexplained"))
    largest = max(seconds, key=lambda name: seconds[name])
    if seconds[largest] <= max(unexplained, thresholds[largest]):
        return NO_CAUSE
    bar = next(bar for bar in bars if bar.bar == largest)
    return bar.evidence.split(":")[0].replace("rank", "slow rank", 1) if largest == "slow rank" else largest


def _command(config: Mapping[str, Any], gpus: int) -> str:
    """The command line of the run, with the keys that this version's defaults may not give."""
    words = [f"+{group}={config[group]['name']}" for group in ("framework", "model")]
    words += [f"{group}={config[group]['name']}" for group in CHOICES]
    plain = {group: config[group] for group in ("framework", "model")}
    plain["train"] = {key: config["train"].get(key) for key in KEPT}
    for group, values in plain.items():
        words += [
            f"{group}.{key}={value}".replace(", ", ",")
            for key, value in values.items()
            if key not in ("name", "_target_") and isinstance(value, (int, float, str, list))
        ]
    launcher = f"torchrun --nproc-per-node={gpus}" if gpus > 1 else "python"
    return " ".join([launcher, "-m ddlbench", *words])


def _next(bar: Bar, command: str) -> str:
    """The command line with the changes of NEXT, each key once: Hydra refuses a choice that is given twice."""
    if bar.bar not in NEXT or not bar.seconds:
        return ""
    changes = NEXT[bar.bar].split()
    changed = {word.partition("=")[0] for word in changes}
    return " ".join([*(word for word in command.split(" ") if word.partition("=")[0] not in changed), *changes])
