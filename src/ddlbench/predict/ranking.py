"""The predictions as a table, and the best of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ddlbench.config.keys import written
from ddlbench.measure.marks import MARKS, other_updates
from ddlbench.oracle.predictor import Prediction
from ddlbench.results.rows import group_by
from ddlbench.texts import GIB, aligned, counted, first_few

TIMES = ("compute", "comm", "hidden", "bubble", "data")
WHICH = ("framework", "layout", "gpus")
COLUMNS = (*WHICH, "step", "80 %", *TIMES, "memory", "error", "fits", "samples/s", "epoch", "reason")
TIE = 0.03  # without a band: the oracle cannot distinguish smaller differences
DECIDING_STEPS = 100  # of a run that decides between two frameworks
Z80 = 1.2816  # normal quantile of a band of 80 %
LATE = ("pipedream", "pipedream_2bw")  # their gradients are of older weights; so may be those of parameter_server
SHOWN, EQUAL = 10, 3  # of the best plans; plans of a framework that are named
DRAWS = 10_000  # of the steps of frameworks within their bands


def ranked(rows: Sequence[Prediction]) -> list[Prediction]:
    """Rows by number of GPUs; for each number the fastest row that fits first, refusals last."""
    return sorted(
        rows, key=lambda row: (row.gpus, row.status != "ok", row.fits is False, row.step_s or 0.0, row.framework)
    )


def fitting(
    rows: Sequence[Prediction], max_gpus: int | None = None, max_memory: float | None = None
) -> list[Prediction]:
    """The rows that fit the device, on at most so many GPUs and in so many bytes: the most samples a second come
    first, and of equal rows the one on fewer GPUs."""
    capped = [row for row in rows if row.status == "ok" and row.fits is not False]
    capped = [row for row in capped if max_gpus is None or row.gpus <= max_gpus]
    capped = [row for row in capped if max_memory is None or (row.memory_bytes or 0.0) <= max_memory]
    return sorted(capped, key=lambda row: (-(row.samples_per_s or 0.0), row.gpus))


def table(rows: Sequence[Prediction]) -> str:
    """A table for the terminal, one line per prediction, without refusals."""
    lines = list[tuple[str, ...]]()
    for row in (row for row in rows if row.status == "ok"):
        seconds = (row.compute_s, row.comm_exposed_s, row.comm_hidden_s, row.bubble_s, row.data_s)
        # Rounding may leave 1e-16 s of equal seconds.
        times = ("" if took is None else f"{round(took * 1e3, 6):.4g} ms" for took in seconds)
        step_ms, low_ms, high_ms = (1e3 * (end or 0.0) for end in (row.step_s, row.low_80_s, row.high_80_s))
        band = f"{low_ms:.4g} to {high_ms:.4g} ms" if row.low_80_s else "none"
        fits = {True: "yes", False: "no", None: "?"}[row.fits]
        memory, error = f"{(row.memory_bytes or 0.0) / GIB:.2f} GiB", f"±{row.memory_error or 0.0:.0%}"
        rate = f"{row.samples_per_s or 0.0:.4g}{'*' if row.marks else ''}"
        epoch = "" if row.epoch_s is None else f"{row.epoch_s:.4g} s"
        why = row.reason.removeprefix(f"at {counted(row.gpus, 'GPU')} ")
        lines.append((*which(row), f"{step_ms:.4g} ms", band, *times, memory, error, fits, rate, epoch, why))
    return "\n".join(aligned(COLUMNS, lines, left=(*WHICH[:2], "reason")))


def which(row: Prediction) -> tuple[str, str, str]:
    """Framework, layout (of a plan with shards of a pipeline, micro batch and recomputation) and GPUs."""
    layout = "x".join(f"{key}{value}" for key, value in row.layout.items() if value > 1 and key != "shards")
    keys = ("framework.sharded", "train.micro_batch", "train.checkpoint_activations")
    sharded, size, recompute = map(row.settings.get, keys)
    plan = ("sharded" if sharded else "", f"micro batch {size}" if size else "", "recompute" if recompute else "")
    return row.framework, " ".join(filter(None, (layout, *plan))), str(row.gpus)


def marks(rows: Sequence[Prediction]) -> list[str]:
    """The meaning of the asterisks; the terms of the cluster that runs with several GPU counts determine, and those
    that they do not."""
    lines = [f"* {mark}" for row in rows for mark in row.marks]
    lines += [f"{row.framework}: {line}" for row in rows for line in row.learned]
    return list(dict.fromkeys(lines))


def notes(rows: Sequence[Prediction]) -> list[str]:
    """The largest degree of each strategy and the layer that sets it; each reason of a refusal, with the GPU counts;
    which frameworks train something else."""
    largest = (limit for row in rows for limit in row.limits if limit["degree"] != "dp")
    lines = [f"limit: {limit['degree']} <= {limit['largest']} ({limit['layer']})" for limit in largest]
    refused = group_by((row for row in rows if row.status != "ok"), lambda row: (row.framework, row.reason))
    for (name, reason), same in refused.items():
        lines.append(f"refused: {name} at {', '.join(str(row.gpus) for row in same)}: {reason}")
    if others := sorted({row.framework for row in rows if row.status == "ok" and _other_updates(row)}):
        lines.append(f"other updates: {', '.join(others)}: {MARKS['other updates']}")
    return list(dict.fromkeys(lines))


def _other_updates(row: Prediction) -> bool:
    options = json.dumps(vars(row.config.framework), default=str) if row.config else ""
    return row.framework in LATE or other_updates(options)


def conclusion(rows: Sequence[Prediction], caps: str) -> list[str]:
    """The best row; other frameworks and plans on the same GPUs that the bands do not separate from it, the expected
    loss of choosing the best row without a run, and the runs that decide. rows: in the order of `fitting`"""
    if not rows:
        return [f"nothing that fits{caps}"]
    best = rows[0]
    layout = " ".join(f"{key}={value}" for key, value in best.layout.items())
    rate = f"{best.samples_per_s:.4g} samples/s"
    head = f"best{caps}: {best.framework} ({layout}) at {counted(best.gpus, 'GPU')}, {rate}: {best.reason}"
    equal = [row for row in rows[1:] if row.gpus == best.gpus and not separated(best, row)]
    if not equal:
        return [head]
    others = list[str]()
    for framework, same in group_by(equal, lambda row: row.framework).items():
        plans = [which(row)[1] for row in same if row.settings]
        others.append(f"{framework} ({'; '.join(first_few(plans, EQUAL))})" if plans else framework)
    names = ", ".join(others)
    if best.high_80_s is None:
        return [f"{head}; within {TIE:.0%} of it: {names}"]
    # The errors of one framework's plans are not independent, and those of the same equations are the same: `deepspeed`
    # and its stage.
    fastest = [row for row, *_ in group_by([best, *equal], lambda row: row.framework).values()]
    fastest = [row for row, *_ in group_by(fastest, lambda row: row.step_s).values()]
    unsure = f"their bands of 80 % overlap, so the predictions do not separate it from {names}"
    if len(fastest) == 1:
        return [head, unsure]
    # The smallest set of runs that decides, if the best row takes as long as predicted.
    runs = [best, *(row for row in fastest[1:] if (row.low_80_s or 0.0) < (best.step_s or 0.0))]
    hours = sum(row.gpus * DECIDING_STEPS * (row.step_s or 0.0) / 3600 for row in runs)
    return [
        head,
        unsure,
        f"choosing {best.framework} now costs {regret(fastest):.1%} of a step in the mean, against the fastest of them",
        f"to decide, run {DECIDING_STEPS} steps of {', '.join(row.framework for row in runs)} at "
        f"{counted(best.gpus, 'GPU')}: {hours:.2g} GPU-hours beside start and warm-up",
    ]


def separated(best: Prediction, other: Prediction) -> bool:
    """Whether the bands of 80 % of two predictions with the same GPUs are apart; without bands, whether the other one
    is slower by more than TIE."""
    if best.high_80_s is None or other.low_80_s is None:
        return (other.samples_per_s or 0.0) < (1 - TIE) * (best.samples_per_s or 0.0)
    return other.low_80_s > best.high_80_s


def regret(equal: Sequence[Prediction]) -> float:
    """The expected seconds of a step of the first row over those of the fastest one, minus 1. The logarithm of each
    measured step is drawn from a normal distribution with the row's band of 80 %, independently."""
    ends = np.log([[row.low_80_s or 0.0, row.high_80_s or 0.0] for row in equal])
    middle, half = ends.mean(axis=1), (ends[:, 1] - ends[:, 0]) / 2
    steps = np.random.default_rng(0).normal(middle, half / Z80, (DRAWS, len(equal)))
    return float(np.exp(steps[:, 0] - steps.min(axis=1)).mean() - 1)


def command(row: Prediction) -> str:
    """The words of ddlbench for a plan."""
    words = [f"{key}={written(value)}" for key, value in row.settings.items()]
    return " ".join([f"+framework={row.framework}", *words])
