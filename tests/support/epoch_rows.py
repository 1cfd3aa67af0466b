"""Rows of epochs with given times of their steps, on one rank."""

from __future__ import annotations

from typing import Any

from ddlbench.measure.clock import EpochTimes
from ddlbench.measure.devices.memory import PEAKS
from ddlbench.measure.rows import EpochRow, RankEpoch, gather_epoch

MEMORY: dict[str, int | None] = dict.fromkeys(PEAKS) | {"memory_host_peak_bytes": 1000}


def rank_epoch(step_s: list[float], warmup: int = 0, losses: list[float] | None = None) -> RankEpoch:
    measured = sum(step_s[warmup:])
    times = EpochTimes(sum(step_s), measured, 0.0, warmup, step_s, [seconds / 4 for seconds in step_s])
    return RankEpoch(0, 0, times, losses or [1.0] * len(step_s), [0.1] * len(step_s), MEMORY, 8 * len(step_s))


def epoch_row(epoch: int, epochs: int, step_s: list[float], **kwargs: Any) -> EpochRow:
    return gather_epoch(epoch, epochs, rank_epoch(step_s, **kwargs), global_batch=8, updates=len(step_s))
