"""Timelines in the Chrome trace format, which ui.perfetto.dev opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddlbench.errors import reporting


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


def write(file: Path, slices: Iterable[Slice]) -> None:
    """UserError if the file cannot be written."""
    with reporting(f"the trace {file} cannot be written", "choose another file"):
        file.write_text(json.dumps({"traceEvents": list(events(slices))}), encoding="utf-8")


def events(slices: Iterable[Slice]) -> Iterator[dict[str, Any]]:
    """Processes and tracks get numbers in their order. Complete events (X) of one track must not overlap, asynchronous
    ones (b, e) may. What takes no time is left out."""
    lasting = [item for item in slices if item.seconds > 0]
    processes = {name: pid for pid, name in enumerate(dict.fromkeys(item.process for item in lasting), 1)}
    tracks = {key: tid for tid, key in enumerate(dict.fromkeys(item[:2] for item in lasting), 1)}
    for name, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for (process, name), tid in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": tid, "args": {"name": name}}
    for number, item in enumerate(lasting):
        event = {"name": item.name, "pid": processes[item.process], "tid": tracks[item[:2]], "args": dict(item.args)}
        if item.overlaps:
            event |= {"cat": item.track, "id": number}
            yield event | {"ph": "b", "ts": item.start * 1e6}
            yield event | {"ph": "e", "ts": (item.start + item.seconds) * 1e6}
        else:
            yield event | {"ph": "X", "ts": item.start * 1e6, "dur": item.seconds * 1e6}
