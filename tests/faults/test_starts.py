"""Loader workers hang in no lock of another thread and die of no signal as they start."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import run


@pytest.mark.slow
def test_workers_that_get_signals_as_they_start_give_their_batches() -> None:
    done = run(sys.executable, "-m", "tests.faults.starts", "--starts", "20", "--busy", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "20 starts of 2 workers" in done.stdout
