"""The predictions as a table, and the best of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.oracle.predictor import Prediction
from ddlbench.texts import aligned

GiB = 2**30
TIMES = ("step", "compute", "comm", "hidden", "bubble", "data")
WHICH = ("framework", "layout", "gpus")
COLUMNS = (*WHICH, *TIMES, "memory", "error", "fits", "samples/s", "epoch")
TIE = 0.03  # the oracle cannot distinguish smaller differences
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


def ranked(rows: Sequence[Prediction]) -> list[Prediction]:
    """Rows by number of GPUs; for each number the fastest row that fits first, refusals last."""
    return sorted(
        rows, key=lambda row: (row.gpus, row.status != "ok", row.fits is False, row.step_s or 0.0, row.framework)
    )


def fitting(
    rows: Sequence[Prediction], max_gpus: int | None = None, max_memory: float | None = None
) -> list[Prediction]:
    """The rows that fit the device, on at most so many GPUs and in so many bytes: the most samples a second first; of
    equal rows that on fewer GPUs first."""
    capped = [row for row in rows if row.status == "ok" and row.fits is not False]
    capped = [row for row in capped if max_gpus is None or row.gpus <= max_gpus]
    capped = [row for row in capped if max_memory is None or (row.memory_bytes or 0.0) <= max_memory]
    return sorted(capped, key=lambda row: (-(row.samples_per_s or 0.0), row.gpus))


def table(rows: Sequence[Prediction]) -> str:
    """A table for the terminal, one line per prediction, without refusals."""
    return "\n".join(aligned(COLUMNS, (_cells(row) for row in rows if row.status == "ok"), left=WHICH[:2]))


def memory_table(rows: Sequence[Prediction]) -> str:
    """GiB of the parts of `memory`, one line per prediction."""
    parts = ((row, [(row.memory or {})[name] for name in PARTS]) for row in rows if row.status == "ok")
    lines = ((*_which(row), *(f"{bytes_ / GiB:.3f}" for bytes_ in (*of, row.memory_bytes or 0.0))) for row, of in parts)
    return "\n".join(aligned((*WHICH, *PARTS, "memory"), lines, left=WHICH[:2]))


def _which(row: Prediction) -> tuple[str, str, str]:
    layout = "x".join(f"{key}{value}" for key, value in row.layout.items() if value > 1 and key != "shards")
    return row.framework, layout, str(row.gpus)


def _cells(row: Prediction) -> tuple[str, ...]:
    seconds = (row.step_s, row.compute_s, row.comm_exposed_s, row.comm_hidden_s, row.bubble_s, row.data_s)
    fits = {True: "yes", False: "no", None: "?"}[row.fits]
    memory, error = f"{(row.memory_bytes or 0.0) / GiB:.2f} GiB", f"±{row.memory_error or 0.0:.0%}"
    rate = f"{row.samples_per_s or 0.0:.4g}{'*' if row.marks else ''}"
    epoch = "" if row.epoch_s is None else f"{row.epoch_s:.4g} s"
    times = ("" if took is None else f"{took * 1e3:.4g} ms" for took in seconds)
    return (*_which(row), *times, memory, error, fits, rate, epoch)


def refusals(rows: Sequence[Prediction]) -> list[str]:
    """One line per framework and reason, with the GPU counts."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.status != "ok":
            by_reason.setdefault((row.framework, row.reason), []).append(row.gpus)
    return [f"{name} at {', '.join(map(str, gpus))}: {reason}" for (name, reason), gpus in by_reason.items()]


def marks(rows: Sequence[Prediction]) -> list[str]:
    """The meaning of the asterisks."""
    return [f"* {mark}" for mark in dict.fromkeys(mark for row in rows for mark in row.marks)]


def limits(rows: Sequence[Prediction]) -> list[str]:
    """The largest degree of each strategy and the layer that sets it, once each."""
    largest = (limit for row in rows for limit in row.limits if limit["degree"] != "dp")
    return list(dict.fromkeys(f"{limit['degree']} <= {limit['largest']} ({limit['layer']})" for limit in largest))


def conclusion(rows: Sequence[Prediction], caps: str) -> str:
    """The best row, and other frameworks that are as fast on the same GPUs. rows: in the order of `fitting`"""
    if not rows:
        return f"nothing that fits{caps}"
    best = rows[0]
    layout = " ".join(f"{key}={value}" for key, value in best.layout.items())
    least = (1 - TIE) * (best.samples_per_s or 0.0)
    equal = [row.framework for row in rows[1:] if row.gpus == best.gpus and (row.samples_per_s or 0.0) >= least]
    ties = f"; within {TIE:.0%} of it: {', '.join(equal)}" if equal else ""
    return (
        f"best{caps}: {best.framework} ({layout}) at {best.gpus} GPUs, {best.samples_per_s:.4g} samples/s: "
        f"{best.reason}{ties}"
    )
