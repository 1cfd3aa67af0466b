"""Rows of scaling.csv: repeats are merged, and each measurement gets the bases with which it is compared. breakdown.csv
says where the time of a step goes; it has the rows with a profiled window.

The shares of a step by GPU count are the table of Aach et al. 2023; its seconds (forward, backward, update,
communication, data) the stacked bars of Lin et al. 2022.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

import pandas as pd

from ddlbench.record.schema import BREAKDOWN, SCALING
from ddlbench.results.rows import PUBLISHED, Row, Settings, group_by, latest
from ddlbench.results.tables import stats
from ddlbench.results.tables.checks import marks_of
from ddlbench.results.tables.labels import across, knobs, layout, settings_text, variants
from ddlbench.results.tables.measurement import Measurement
from ddlbench.results.tables.merge import ANY_SCALING, BY_FRAMEWORK, KINDS, SEED, AttemptRow, Comparison, Point, size
from ddlbench.results.tables.stats import confidence, median_interval

# A published measurement without a base has no ratio, not even to itself.
_NO_RATIOS: Row = dict.fromkeys(("speedup", "efficiency", "speedup_vs_own_base", "efficiency_vs_own_base"))
# The parts of a step, in the order of a bar from bottom to top. The shares PART_share add up to 1, the seconds
# PART_step_s add up to profile_step_time_s. Communication is the exposed part of it.
PARTS = ("forward", "backward", "update", "other_compute", "comm_exposed", "data", "idle")
SHARES = ("compute_share", "comm_share", *(f"{part}_share" for part in PARTS))


def scaling_rows(groups: Sequence[list[AttemptRow]], how: Comparison = BY_FRAMEWORK) -> list[Measurement]:
    """One row for each measurement and kind of scaling, sorted."""
    samples = [group[0] for group in groups]
    settings = {
        "knobs": knobs(samples, how), "variant": variants(samples, how),
        "learning_variant": variants(samples, how, without=SEED), "across": across(samples, how),
    }  # fmt: skip
    points = [
        Point(group, how, {column: values[n] for column, values in settings.items()}) for n, group in enumerate(groups)
    ]
    any_scaling = ANY_SCALING in how.across
    tables = group_by(points, lambda point: point.comparison)

    def series(kind: str, point: Point) -> tuple[str, Any, str | None]:
        """Equal for points that scale together. In a table for any scaling, only the points of one curve do."""
        return point.comparison, size(point.sample.row, kind), point.curve if any_scaling else None

    by_series = {kind: group_by(points, partial(series, kind)) for kind in KINDS}
    rows: list[Measurement] = []
    for point in points:
        peers = {kind: by_series[kind][series(kind, point)] for kind in KINDS}
        several = [kind for kind in KINDS if len({peer.gpus for peer in peers[kind]}) > 1]
        scaled = [kind for kind in several if point.sample.row[KINDS[kind]] is not None] or ["single"]
        for kind in scaled:
            along = peers.get(kind, peers["strong"])  # the points with its size
            compared = tables[point.comparison] if any_scaling else along
            curve = [peer for peer in along if (peer.curve, peer.cluster) == (point.curve, point.cluster)]
            rows.append(_measurement(point, kind, compared, curve))
    if any_scaling:
        rows = _with_scaling(rows)
    curves = group_by(sorted(rows, key=lambda row: (row["gpus"] or 0, str(row["layout"]))), _curve)
    # Within a place, curves on one GPU come first, because they are the base of the others.
    ordered = sorted(curves.items(), key=lambda curve: (curve[0][0], curve[1][-1]["gpus"] or 0, curve[0][1]))
    return [row for _, rows in ordered for row in rows]


def _with_scaling(rows: Sequence[Measurement]) -> list[Measurement]:
    """The kind of scaling and its size become settings in which rows of one table differ."""
    named: list[Measurement] = []
    for table in group_by(rows, lambda row: row["comparison"]).values():
        kinds: list[Settings] = [{"scaling": row["scaling"], "batch": f"{size(row.row) or 0:g}"} for row in table]
        differing = [name for name in ("scaling", "batch") if len({kind[name] for kind in kinds}) > 1]
        for row, kind in zip(table, kinds, strict=True):
            settings = row.settings["across"] | {name: kind[name] for name in differing}
            text = {"across": settings_text(settings) or None}
            named.append(replace(row, row=row.row | text, settings={**row.settings, "across": settings}))
    return named


def _curve(row: Measurement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The place of a curve in the table, own ones before published ones, and what distinguishes the curves there."""
    place = ("origin", "model", "data", "loader", "variant", "comparison", "scaling")
    names = ("framework", "knobs", "across")
    return (*(str(row[name]) for name in place), f"{size(row.row) or 0:12}"), tuple(str(row[name]) for name in names)


def _measurement(point: Point, kind: str, compared: list[Point], curve: list[Point]) -> Measurement:
    """compared: the points with which it is compared; curve: those of its own curve and cluster"""
    timed, curve = (
        [peer for peer in peers if peer.sample_time_s and peer.gpus and not peer.sample.row["reference"]]
        for peers in (compared, curve)
    )
    base = _stated_base(point) or min(curve, key=lambda peer: (peer.gpus, peer.sample_time_s), default=None)
    single = min((peer for peer in timed if peer.gpus == 1), key=lambda peer: peer.sample_time_s or 0.0, default=None)
    published = point.sample.row["origin"] == PUBLISHED
    of_single = dict(single.settings["across"]) if single else {}
    if single and single.cluster != point.cluster:
        of_single["cluster"] = str(single.cluster)
    settings = {
        **point.settings,
        "layout": layout(point.sample),
        "model_changed": point.sample.sizes,
        "best_single_across": of_single,
    }
    row = {
        **dict.fromkeys(column.name for column in SCALING),
        **_merged(point),
        **{column: settings_text(values) or None for column, values in settings.items()},
        **_facts(point, kind),
        **_rates(point),
        **merged_windows([run.row for run in point.ok]),
        **merged_own_steps([run.row for run in point.ok]),
        **_against(point, single, kind, "best_single"),
        **_against(point, base, kind, "own_base", "_vs_own_base"),
        **(_NO_RATIOS if published and base is point and len(curve) == 1 else {}),
    }
    return Measurement(
        row,
        point.how,
        settings,
        mark_names={name for run in point.ok for name in marks_of(run.row)},
        options=point.sample.added_later | point.sample.options,
        passes=next((run.passes for run in point.runs if run.passes), {}),
        runs=[run.row for run in point.ok],
    )


def _merged(point: Point) -> Row:
    """The columns that repeats have in common, the columns with the median or the largest value of the repeats, and the
    times with their intervals."""
    merges = {"median": median, "max": max}
    merged: Row = {column.name: point.sample.row[column.name] for column in SCALING if column.source == "equal"}
    for column in SCALING:
        if column.source in merges and (values := point.values(column.name)):
            merged[column.name] = merges[column.source](values)
    count = len(point.sample_times)
    merged |= {"interval": confidence(count, point.interval) if count else None, "sample_time_s": point.sample_time_s}
    for name, seconds in (("epoch_time", point.values("epoch_time_s")), ("sample_time", point.sample_times)):
        interval = median_interval(seconds)
        ends = (interval.low, interval.high) if interval else (None, None)
        merged[f"{name}_low_s"], merged[f"{name}_high_s"] = ends
        merged[f"{name}_shortest_s"] = min(seconds, default=None)
        merged[f"{name}_longest_s"] = max(seconds, default=None)
    return merged


def _stated_base(point: Point) -> Point | None:
    """The base that a published measurement states itself: its source may have no row for it."""
    row = point.sample.row
    if row["origin"] != PUBLISHED or not row["stated_base_gpus"] or not row["stated_base_sample_time_s"]:
        return None
    rate = 1 / row["stated_base_sample_time_s"]
    stated = row | {"gpus": row["stated_base_gpus"], "throughput_samples_per_s": rate, "epoch_time_s": None}
    return Point([replace(point.sample, row=stated)], point.how)


def _against(point: Point, base: Point | None, kind: str, prefix: str, suffix: str = "") -> Row:
    """The columns of one base: what it is, named with `prefix`, and speedup and efficiency with their intervals, named
    with `suffix`. A verdict needs a base that differs only in the compared factors and the GPU count."""
    if base is None or not base.sample_time_s or not base.gpus:
        return {}
    epochs = base.values("epoch_time_s")
    epoch_s = median(epochs) if epochs else None
    row: Row = {
        f"{prefix}_framework": base.sample.row["framework"],
        f"{prefix}_compared": base.compared,
        f"{prefix}_gpus": base.gpus,
        f"{prefix}_sample_time_s": base.sample_time_s,
        f"{prefix}_epoch_time_s": epoch_s,
    }
    if not point.sample_time_s or not point.gpus:
        return row
    # Aach et al. 2023, equations 3 and 4: T_p0 / T_p, and T_p0 p0 / (T_p p), the reached share of the ideal p / p0. The
    # time of a sample serves strong scaling, weak scaling over a fixed data set and shortened epochs.
    row[f"speedup{suffix}"] = base.sample_time_s / point.sample_time_s
    row[f"efficiency{suffix}"] = base.sample_time_s * base.gpus / (point.sample_time_s * point.gpus)
    if point is base or point.interval is None or base.interval is None:
        return row  # the ratio of a base to itself is 1 by definition
    ratio, share = stats.ratio_interval(base.interval, point.interval), base.gpus / point.gpus
    one, other = base.sample.row, point.sample.row
    alike = one["cluster"] == other["cluster"] and size(one, kind) == size(other, kind)
    if alike and base.verdict_group == point.verdict_group:
        row[f"speedup{suffix}_verdict"] = stats.verdict(ratio, "speedup", "slowdown", stats.NONE_SHOWN)
    return row | {
        f"speedup{suffix}_low": ratio.low,
        f"speedup{suffix}_high": ratio.high,
        f"speedup{suffix}_coverage": ratio.coverage,
        f"efficiency{suffix}_low": ratio.low * share,
        f"efficiency{suffix}_high": ratio.high * share,
    }


def _facts(point: Point, kind: str) -> Row:
    last = latest(run.row for run in point.runs)
    marks = Counter(mark for run in point.ok for mark in marks_of(run.row).values())
    commits = {run.row["git_commit"] for run in point.ok if run.row["git_commit"]}
    return {
        "scaling": kind,
        "status": "ok" if point.ok else last["status"],
        "reason": None if point.ok else last["reason"],
        "runs_ok": len(point.ok),
        "runs_timed": len(point.sample_times),
        "attempts_failed": len(point.runs) - len(point.ok),
        "git_commits": " ".join(sorted(commits)) or None,
        "marks": "; ".join(f"{mark} ({count} of {len(point.ok)})" for mark, count in sorted(marks.items())) or None,
        "comparison": point.comparison,
        "learning_comparison": point.how.comparison_id(point.sample, SEED),
        "compared_by": ", ".join(point.how.by),
        "compared": point.compared,
        "compared_across": ", ".join(point.how.across) or None,
        "verdict_group": point.verdict_group,
    }


def _rates(point: Point) -> Row:
    """All rates, from the merged seconds per sample."""
    seconds, gpus, row = point.sample_time_s, point.gpus, point.sample.row
    if not seconds or not gpus:
        return {}
    tokens, flops = row["tokens_per_sample"], row["flops_per_sample"]
    flops_per_s = flops / (seconds * gpus) if flops else None
    steady = [1 / rate for rate in point.values("throughput_steady_samples_per_s") if rate > 0]
    computed = row["hardware_flops_per_sample"]
    used = ((run.row["model_flops_per_s_per_gpu"], run.row["mfu"]) for run in point.ok)
    peak = next((rate / share for rate, share in used if rate and share), None)
    mfu = flops_per_s / peak if flops_per_s and peak else None
    return {
        "throughput_samples_per_s": 1 / seconds,
        "throughput_samples_per_s_per_gpu": 1 / (seconds * gpus),
        "tokens_per_s": tokens / seconds if tokens else None,
        "model_flops_per_s_per_gpu": flops_per_s,
        "mfu": mfu,
        # No speedup is computed of these.
        "throughput_steady_samples_per_s": 1 / median(steady) if steady else None,
        "hfu": mfu * computed / flops if mfu and computed and flops else None,
    }


def merged_windows(runs: Sequence[Row]) -> Row:
    """Shares and step time of repeats, from the sums of their seconds. Runs without a window do not count."""
    profiled = [run for run in runs if all(run[name] for name in ("profile_window_s", "profile_steps", "gpus"))]
    if not profiled:
        return {"profile_windows": 0}
    window_s = sum(run["profile_window_s"] for run in profiled)
    steps = sum(run["profile_steps"] * run["gpus"] for run in profiled)  # of single ranks
    complete = [name for name in SHARES if all(run[name] is not None for run in profiled)]
    return {
        **{name: sum(run[name] * run["profile_window_s"] for run in profiled) / window_s for name in complete},
        "profile_step_time_s": window_s / steps,
        "profile_windows": len(profiled),
    }


def merged_own_steps(runs: Sequence[Row]) -> Row:
    """Medians over the runs whose own steps come from a profiled window; if there are none, from a thread's time."""
    names = ("own_step_s", "own_step_median_rank_s")
    for source in ("window", "thread"):
        rows = [run for run in runs if run["own_step_source"] == source and None not in map(run.get, names)]
        if rows:
            return {"own_step_source": source, **{name: median(run[name] for run in rows) for name in names}}
    return {}


def breakdown(scaling: pd.DataFrame) -> pd.DataFrame:
    """The rows of scaling.csv with a profiled window, each measurement once, in the order of that table."""
    with_window = cast(pd.DataFrame, scaling[scaling["profile_windows"].fillna(0) > 0])
    rows = with_window.drop_duplicates(subset=["measurement"])
    computed = {f"{part}_step_s": rows[f"{part}_share"] * rows["profile_step_time_s"] for part in PARTS}
    computed["comm_overlap_share"] = rows["comm_share"] - rows["comm_exposed_share"]
    return rows.assign(**computed).reset_index(drop=True).filter([column.name for column in BREAKDOWN])
