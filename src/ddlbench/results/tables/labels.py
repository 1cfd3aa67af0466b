"""The settings in which measurements differ: what a table or a figure must show beside the names."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.rows import Row, Settings, group_by
from ddlbench.results.tables.merge import BY_FRAMEWORK, LAYOUT, SEEN, AttemptRow, Comparison
from ddlbench.texts import shortened

# Settings that have a column of their own.
_SHOWN = ("mode", "source", *(f"train.{name}" for name in ("precision", "repeat", "global_batch", "batch_per_gpu")))
# The key that is always shown beside the name of a framework, because the name alone says too little.
ALWAYS_SHOWN = {"deepspeed": "zero_stage", "hybrid": "schedule"}
LONGEST = 1_000  # letters of all settings together
LONGEST_VALUE = 100
# Settings of `Comparison.across` that a column of runs.csv names.
_NAMED = ("recipe", "data", "precision", "device", "torch")
_VERSIONS = ("dataset_hash", "device_model", "torch", "cuda")


def knobs(runs: Sequence[AttemptRow], comparison: Comparison = BY_FRAMEWORK) -> list[Settings]:
    """The distinguishing settings of each run.

    These are the settings of the compared factors (for a framework also the micro batch) in which runs of the same name
    differ, and the key of ALWAYS_SHOWN. The precision scheme comes first, unless it is autocast; the parts of the
    environment that separate runs come last.
    """
    within = _columns(*dict.fromkeys((*comparison.by, "framework", "model", "model_changed")))

    def chosen(run: AttemptRow) -> Row:
        kept = [key for key in run.options if comparison.is_compared(key) and _is_setting(key)]
        return {key if key.startswith("train.") else key.partition(".")[2]: run.options[key] for key in kept}

    differing = _differences(runs, within, chosen, lambda run: ALWAYS_SHOWN.get(run.row["framework"] or ""))
    schemes: list[Settings] = [
        {} if scheme in (None, "autocast") else {"precision_scheme": scheme}
        for scheme in (run.row["precision_scheme"] for run in runs)
    ]
    # Of the environment, the versions, switches and kinds of host in which runs of one framework and model differ, and
    # the variables and cores in which runs of equal configuration differ. A run that recorded no environment differs in
    # nothing from others.
    names = _columns("framework", "model", "model_changed")
    curve = _differences(runs, lambda run: (names(run), not run.environment), partial(_around, launch=False))
    launch = _differences(runs, lambda run: (run.asked, not run.environment), partial(_around, launch=True))
    parts = zip(schemes, differing, curve, launch, strict=True)
    return [scheme | options | versions | variables for scheme, options, versions, variables in parts]


def variants(
    runs: Sequence[AttemptRow], comparison: Comparison = BY_FRAMEWORK, without: str | None = None
) -> list[Settings]:
    """For each run the other settings and versions in which runs of equal model, loader, data and recipe differ.
    without: a setting that is left out"""
    fixed = () if "framework" in comparison.by else ("framework",)
    names = [name for name in ("model", "model_changed", "loader", "data", "recipe") if name not in comparison.by]

    def others(run: AttemptRow) -> Row:
        options = {k: v for k, v in run.options.items() if not k.startswith("cluster.") and _is_setting(k)}
        values = options | {name: run.row[name] for name in _VERSIONS if run.row[name] is not None}
        shown_elsewhere = (without, *_SHOWN)
        return {
            key: value
            for key, value in values.items()
            if not (comparison.is_compared(key) or comparison.is_across(key) or key in shown_elsewhere)
        }

    return _differences(runs, _columns(*fixed, *names), others)


def across(runs: Sequence[AttemptRow], comparison: Comparison) -> list[Settings]:
    """For each run the settings of `comparison.across` in which it differs from runs of its table: the names of groups
    and columns, and the keys in which runs of equal names differ."""
    tables = {id(run): comparison.comparison_id(run) for run in runs}
    named = [name for name in comparison.across if name in _NAMED]

    def by_key(run: AttemptRow) -> Row:
        values = {**run.options, **{name: run.row[name] for name in SEEN if run.row[name] is not None}}
        return {key: value for key, value in values.items() if comparison.is_across(key)}

    names = _differences(runs, lambda run: tables[id(run)], lambda run: {name: run.row[name] for name in named})
    keys = _differences(runs, lambda run: (tables[id(run)], *(run.row[name] for name in named)), by_key)
    return [one | two for one, two in zip(names, keys, strict=True)]


def _around(run: AttemptRow, launch: bool) -> Row:
    """A part of the environment, without the columns that `variants` shows."""
    shown = ("torch", "cuda", "packages.torch", "gpu_model", *(("cpu_model",) if run.row["device"] == "cpu" else ()))
    settings = {k: v for k, v in run.environment.items() if of_the_launch(k) == launch and k not in shown}
    return {key.partition(".")[2] or key: value for key, value in settings.items()}


def _columns(*names: str) -> Callable[[AttemptRow], Hashable]:
    return lambda run: tuple(run.row[name] for name in names)


def layout(run: AttemptRow) -> Settings:
    """The layout of the ranks, if the configuration sets it: dp=2 tp=4. A key that is null has the other ranks."""
    degrees = {key.removeprefix("framework."): run.options[key] for key in LAYOUT if key in run.options}
    gpus, given = run.row["gpus"], prod(degree for degree in degrees.values() if isinstance(degree, int))
    if gpus and given > 0 and gpus % given == 0 and list(degrees.values()).count(None) == 1:
        degrees = {key: gpus // given if degree is None else degree for key, degree in degrees.items()}
    return {key: str(degree) for key, degree in degrees.items() if degree is not None}


def _is_setting(key: str) -> bool:
    """Names of options and the layout are shown elsewhere."""
    return not key.endswith(".name") and key not in LAYOUT


def _differences(
    runs: Sequence[AttemptRow],
    within: Callable[[AttemptRow], Hashable],
    settings: Callable[[AttemptRow], Row],
    always: Callable[[AttemptRow], str | None] = lambda _: None,
) -> list[Settings]:
    """For each run the settings in which it differs from runs that are equal in `within`. A setting that only one of
    them has counts, too: a key that a later version added is recorded only if its value is not the earlier behaviour.
    """
    result: list[Settings] = [{} for _ in runs]
    for group in group_by(range(len(runs)), lambda n: within(runs[n])).values():
        options = {n: settings(runs[n]) for n in group}
        keys = sorted({key for values in options.values() for key in values})
        differing = [key for key in keys if len({_value(options[n], key) for n in group} - {None}) > 1]
        for n in group:
            shown = [key for key in keys if key in options[n] and (key in differing or key == always(runs[n]))]
            result[n] = {key: value_text(options[n][key]) for key in shown}
    return result


def _value(options: Row, key: str) -> str | None:
    """None for a version that the run did not record."""
    return value_text(options[key]) if key in options else None if key in _VERSIONS else ""


def settings_text(settings: Settings) -> str:
    """Settings as a text, "a=1 b=[1,2]"."""
    return shortened(" ".join(f"{key}={value}" for key, value in settings.items()), LONGEST)


def value_text(value: Any) -> str:
    """The value of a setting as a text."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))
    return shortened(text, LONGEST_VALUE)
