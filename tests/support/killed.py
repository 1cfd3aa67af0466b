"""Records of runs that were killed as a whole: `running`, with the heartbeat of a process that has ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from ddlbench.heartbeat import Process
from ddlbench.record.files import HEARTBEAT


def ended_process() -> Process:
    child = subprocess.Popen(["true"])
    child.wait()
    return replace(Process.this(), pid=child.pid)


def beat(folder: Path, process: Process, seconds_ago: float) -> float:
    """Leave the heartbeat of a process beside a record; when the last one was."""
    (folder / HEARTBEAT).write_text(json.dumps(vars(process)))
    return beaten(folder, seconds_ago)


def beaten(folder: Path, seconds_ago: float) -> float:
    when = time.time() - seconds_ago
    os.utime(folder / HEARTBEAT, (when, when))
    return when
