"""The settings in which measurements differ, which tables and figures show beside the names."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Sequence
from math import prod
from operator import itemgetter
from typing import Any

from ddlbench.config.choices import changed
from ddlbench.record.fingerprint import of_the_launch
from ddlbench.results.rows import Row, Settings, group_by
from ddlbench.results.tables.merge import BY_FRAMEWORK, LAYOUT, SEEN, AttemptRow, Comparison
from ddlbench.texts import shortened

# Settings that have a column of their own.
_SHOWN = ("mode", "source", *(f"train.{name}" for name in ("precision", "repeat", "global_batch", "batch_per_gpu")))
# Frameworks whose name alone says too little, and the key that is always shown beside it.
ALWAYS_SHOWN = {"deepspeed": "zero_stage", "hybrid": "schedule"}
LONGEST = 1_000  # letters of all settings together
LONGEST_VALUE = 100
# Settings of `Comparison.across` that have a column in runs.csv.
_NAMED = ("recipe", "data", "precision", "device", "torch")
_VERSIONS = ("dataset_hash", "device_model", "torch", "cuda")


def knobs(runs: Sequence[AttemptRow], comparison: Comparison = BY_FRAMEWORK) -> list[Settings]:
    """The settings that distinguish each run.

    These are the settings of the compared factors (for a framework also the micro batch) in which runs of the same name
    differ, those that are not as in the framework's YAML, and the key of ALWAYS_SHOWN. The precision scheme comes
    first, unless it is autocast. Parts of the environment that separate runs come last.
    """
    names = ("framework", "model", "model_changed")
    place_of, compared_of = itemgetter(*names, "device"), itemgetter(*dict.fromkeys((*comparison.by, *names)))
    compared: list[Row] = [
        {
            key if key.startswith("train.") else key.partition(".")[2]: value
            for key, value in run.options.items()
            # Names of options and the layout have columns of their own.
            if comparison.is_compared(key) and not key.endswith(".name") and key not in LAYOUT
        }
        for run in runs
    ]
    always = list[set[str]]()
    for run in runs:
        of_framework = {key.removeprefix("framework."): value for key, value in run.options.items()}
        of_framework["name"] = run.row["framework"]
        always.append({ALWAYS_SHOWN.get(run.row["framework"] or "", ""), *changed("framework", of_framework)})
    # Two parts of the environment: the versions, switches and kinds of host in which runs of one framework and model
    # differ, on GPUs or on CPUs alone, and the variables and cores in which runs of equal configuration differ. A run
    # without a recorded environment is not compared with the others.
    parts = zip(
        _differences([compared_of(run.row) for run in runs], compared, always),
        _differences([(place_of(run.row), not run.environment) for run in runs], [_around(run, False) for run in runs]),
        _differences([(run.asked(), not run.environment) for run in runs], [_around(run, True) for run in runs]),
        strict=True,
    )
    schemes = (run.row["precision_scheme"] for run in runs)
    return [
        ({} if scheme in (None, "autocast") else {"precision_scheme": scheme}) | options | versions | variables
        for scheme, (options, versions, variables) in zip(schemes, parts, strict=True)
    ]


def variants(
    runs: Sequence[AttemptRow], comparison: Comparison = BY_FRAMEWORK, without: str | None = None
) -> list[Settings]:
    """The other settings and versions of each run, in which runs of equal model, loader, data and recipe differ.
    without: a setting that is left out"""
    fixed = () if "framework" in comparison.by else ("framework",)
    names = [name for name in ("model", "model_changed", "loader", "data", "recipe") if name not in comparison.by]
    hidden, others = {without, *_SHOWN, *LAYOUT}, list[Row]()
    for run in runs:
        options = {k: v for k, v in run.options.items() if not (k.startswith("cluster.") or k.endswith(".name"))}
        options |= {name: run.row[name] for name in _VERSIONS if run.row[name] is not None}
        shown = (k for k in options if not (k in hidden or comparison.is_compared(k) or comparison.is_across(k)))
        others.append({key: options[key] for key in shown})
    return _differences([tuple(run.row[name] for name in (*fixed, *names)) for run in runs], others)


def across(runs: Sequence[AttemptRow], comparison: Comparison) -> list[Settings]:
    """The settings of `comparison.across` in which each run differs from others of its table: the names of groups and
    columns, and the keys in which runs with equal names differ."""
    tables = [comparison.comparison_id(run) for run in runs]
    named: list[Row] = [{name: run.row[name] for name in comparison.across if name in _NAMED} for run in runs]
    by_key = list[Row]()
    for run in runs:
        values = {**run.options, **{name: run.row[name] for name in SEEN if run.row[name] is not None}}
        by_key.append({key: value for key, value in values.items() if comparison.is_across(key)})
    within = [(table, *names.values()) for table, names in zip(tables, named, strict=True)]
    return [one | two for one, two in zip(_differences(tables, named), _differences(within, by_key), strict=True)]


def _around(run: AttemptRow, launch: bool) -> Row:
    """A part of the environment, without the columns that `variants` shows."""
    shown = ("torch", "cuda", "packages.torch", "gpu_model", *(("cpu_model",) if run.row["device"] == "cpu" else ()))
    settings = {k: v for k, v in run.environment.items() if of_the_launch(k) == launch and k not in shown}
    return {key.partition(".")[2] or key: value for key, value in settings.items()}


def layout(run: AttemptRow) -> Settings:
    """The layout of the ranks, if the configuration sets it: dp=2 tp=4. A key that is null has the remaining ranks."""
    degrees = {key.removeprefix("framework."): run.options[key] for key in LAYOUT if key in run.options}
    gpus, given = run.row["gpus"], prod(degree for degree in degrees.values() if isinstance(degree, int))
    if gpus and given > 0 and gpus % given == 0 and list(degrees.values()).count(None) == 1:
        degrees = {key: gpus // given if degree is None else degree for key, degree in degrees.items()}
    return {key: str(degree) for key, degree in degrees.items() if degree is not None}


def _differences(
    within: Sequence[Hashable], settings: Sequence[Row], always: Sequence[Collection[str]] | None = None
) -> list[Settings]:
    """The settings in which each run differs from those that are equal in `within`, and the keys `always`.

    A setting that only some of them have differs, too: a key that a later version added is recorded only if its value
    is not the earlier behaviour. A version that a run did not record does not differ.
    """
    result: list[Settings] = [{} for _ in settings]
    for group in group_by(range(len(settings)), within.__getitem__).values():
        for key in sorted({key for n in group for key in settings[n]}):
            texts = {n: value_text(settings[n][key]) for n in group if key in settings[n]}
            missing = {""} if len(texts) < len(group) and key not in _VERSIONS else set[str]()
            differs = len({*texts.values()} | missing) > 1
            for n, text in texts.items():
                if differs or (always and key in always[n]):
                    result[n][key] = text
    return result


def settings_text(settings: Settings) -> str:
    """Settings as a text, "a=1 b=[1,2]"."""
    return shortened(" ".join(f"{key}={value}" for key, value in settings.items()), LONGEST)


def value_text(value: Any) -> str:
    """The value of a setting as a text."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))
    return shortened(text, LONGEST_VALUE)
