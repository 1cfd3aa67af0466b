"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

WITHIN_S = 1500  # only a test that fails waits so long


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
