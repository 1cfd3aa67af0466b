"""What the training thread did itself, by the kernel's count: it computed, or was ready and waited for a core."""

from __future__ import annotations

import threading
from pathlib import Path

_awake_s = 0.0  # of the training thread, the only one that waits in this way


def thread_seconds() -> float:
    """Seconds since the start of this thread, the training thread. Waiting for another rank or for a disk is not in it,
    nor sleep. Raises OSError where the kernel does not say."""
    computed, waited, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return (int(computed) + int(waited)) / 1e9 - _awake_s


def waited_awake(seconds: float) -> None:
    """The training thread waited so long for others by asking without a pause: the kernel counts it as computing."""
    global _awake_s
    _awake_s += seconds
