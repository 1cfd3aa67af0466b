"""The bytes of every kind of message in a step, for a reader who wants to check them."""

from __future__ import annotations

from collections.abc import Sequence

from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.reason import size


def volumes(rows: Sequence[Prediction]) -> str:
    """A line for each framework, number of GPUs and kind of message; of whole messages, as a group's ranks end with."""
    lines = ["", "volume of a step by the equations:"]
    for row in rows:
        for message in row.messages:
            count = f"{message['count']:g} x, " if message["count"] else ""
            lines.append(f"  {row.framework} at {row.gpus}: {message['what']}: {count}{size(message['bytes_'])}")
    return "\n".join(lines)
