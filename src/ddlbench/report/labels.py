"""The settings in which measurements differ, as short texts: what a table or a figure must tell beside the names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ddlbench.report.merge import LAYOUT, Row, Run, group_by
from ddlbench.report.texts import shortened

# Settings that have a column of their own.
_TOLD = {"mode", *(f"train.{name}" for name in ("precision", "repeat", "global_batch", "batch_per_gpu", "micro_batch"))}
LONGEST = 1_000  # letters of all settings together
LONGEST_VALUE = 100
_VERSIONS = ("dataset_hash", "device_model", "torch", "cuda")


def knobs(runs: Sequence[Run]) -> list[str]:
    """For each run the settings of the framework, and the micro batch, in which runs of its framework differ; before
    them how it computes in 16 bits, where that is not autocast as in most frameworks."""
    differing = _differences(runs, ("framework", "model"), _knobs)
    return [" ".join(filter(None, texts)) for texts in zip(map(_scheme, runs), differing, strict=True)]


def variants(runs: Sequence[Run]) -> list[str]:
    """For each run the other settings and versions in which runs of its model, loader, data and recipe differ."""
    return _differences(runs, ("model", "loader", "data", "recipe"), _others)


def layout(run: Run) -> str:
    """How the ranks are laid out, where the configuration says so: "dp=2 tp=4"."""
    return _join({key.removeprefix("framework."): run.options.get(key) for key in LAYOUT})


def _scheme(run: Run) -> str:
    scheme = run.row["precision_scheme"]
    return "" if scheme in (None, "autocast") else f"precision_scheme={scheme}"


def _knobs(run: Run) -> Row:
    return {key.removeprefix("framework."): value for key, value in _chosen(run, _is_knob).items()}


def _chosen(run: Run, choose: Callable[[str], bool]) -> Row:
    return {key: value for key, value in run.options.items() if choose(key)}


def _is_knob(key: str) -> bool:
    return key == "train.micro_batch" or (key.startswith("framework.") and key not in LAYOUT)


def _is_other(key: str) -> bool:
    return not key.startswith(("framework.", "cluster.")) and not key.endswith(".name") and key not in _TOLD


def _others(run: Run) -> Row:
    seen = {name: run.row[name] for name in _VERSIONS if run.row[name] is not None}
    return _chosen(run, _is_other) | seen


def _differences(runs: Sequence[Run], within: tuple[str, ...], settings: Callable[[Run], Row]) -> list[str]:
    """A setting is told where two runs that are equal in the columns `within` have different values of it."""
    texts = [""] * len(runs)
    for group in group_by(range(len(runs)), lambda n: tuple(runs[n].row[name] for name in within)).values():
        own = {n: settings(runs[n]) for n in group}
        keys = sorted({key for values in own.values() for key in values})
        differing = [key for key in keys if len({_text(own[n][key]) for n in group if key in own[n]}) > 1]
        for n in group:
            texts[n] = _join({key: own[n][key] for key in differing if key in own[n]}, null="null")
    return texts


def _join(values: Row, null: str | None = None) -> str:
    texts = {key: null if value is None else _text(value) for key, value in values.items()}
    joined = " ".join(f"{key}={text}" for key, text in texts.items() if text is not None)
    return shortened(joined, LONGEST)


def _text(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, default=str), LONGEST_VALUE)
