"""A step that allocates what the step before freed pays no page faults for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.support.waiting import WITHIN_S

# Six blocks of 9 MiB are freed together: more than glibc keeps by itself at the top of its heap.
STEPS = """
import resource, sys
from ddlbench.measure.devices.memory import keep_freed_memory

def step():
    blocks = [bytearray(9 * 2**20) for _ in range(6)]

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def steps(how: str, **variables: str) -> tuple[str, int]:
    """What keep_freed_memory returned, and the page faults of ten steps."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_taken_again_without_page_faults():
    _, without = steps("leave")
    kept, faults = steps("keep")
    assert kept == "True"
    assert without > 10 * 9 * 2**20 / 4096 > 100 * faults


def test_the_users_own_setting_is_kept():
    assert steps("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
