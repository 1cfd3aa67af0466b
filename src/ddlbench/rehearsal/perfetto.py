"""Timelines in the Chrome trace format, which ui.perfetto.dev opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddlbench.errors import UserError


class Slice(NamedTuple):
    """Something that lasts, on one track of one process; start and length in seconds. overlaps: slices of this track
    may overlap."""

    process: str
    track: str
    name: str
    start: float
    seconds: float
    args: Mapping[str, Any] = {}
    overlaps: bool = False


def write(file: Path, slices: Sequence[Slice]) -> None:
    """UserError if the file cannot be written."""
    try:
        file.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events(slices))}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the trace {file} cannot be written ({error.strerror}): choose another file") from error


def events(slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Processes and tracks get numbers in their order. Complete events (X) of one track must not overlap, asynchronous
    ones (b, e) may."""
    processes = {name: pid for pid, name in enumerate(dict.fromkeys(item.process for item in slices), 1)}
    tracks = {key: tid for tid, key in enumerate(dict.fromkeys(item[:2] for item in slices), 1)}
    for name, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for (process, name), tid in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": tid, "args": {"name": name}}
    for number, item in enumerate(slices):
        event: dict[str, Any] = {"name": item.name, "pid": processes[item.process], "tid": tracks[item[:2]]}
        event |= {"ts": item.start * 1e6, "args": dict(item.args)}
        if item.overlaps:
            event |= {"cat": item.track, "id": number}
            yield event | {"ph": "b"}
            yield event | {"ph": "e", "ts": (item.start + item.seconds) * 1e6}
        else:
            yield event | {"ph": "X", "dur": item.seconds * 1e6}
