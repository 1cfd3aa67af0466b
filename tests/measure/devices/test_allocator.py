"""A step that allocates what the step before freed pays no page faults for it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from ddlbench.measure.devices.memory import keep_freed_memory
from tests.support.waiting import WITHIN_S

# Page faults of ten steps, before freed memory is kept and after. Six blocks of 9 MiB are freed together: more than
# glibc keeps by itself at the top of its heap.
STEPS = """
import json, resource
from ddlbench.measure.devices.memory import keep_freed_memory

def step():
    blocks = [bytearray(9 * 2**20) for _ in range(6)]

def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([faults(), keep_freed_memory(), faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_taken_again_without_page_faults():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    without, kept, faults = json.loads(done.stdout)
    assert kept
    assert without > 10 * 9 * 2**20 / 4096 > 100 * faults


def test_the_users_own_setting_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert keep_freed_memory() is False
