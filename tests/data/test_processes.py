"""Work in processes: jobs taken as they are needed, and nothing left behind; see data/processes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count, islice

import pytest

from ddlbench.data.processes import in_processes
from ddlbench.errors import UserError
from tests.support.waiting import WITHIN_S


def square(number):
    if number == 5:
        raise UserError("five is refused")
    return number * number


def test_results_and_jobs_taken_as_needed():
    taken = []
    endless = (taken.append(number) or number % 5 for number in count())
    results = in_processes(square, endless, 2)
    first = sorted(islice(results, 10))
    results.close()
    assert set(first) <= {0, 1, 4, 9, 16}
    assert len(first) == 10
    assert len(taken) <= 10 + 2 * 2 + 1


def test_an_error_in_a_process_ends_the_work():
    with pytest.raises(UserError, match="five is refused"):
        list(in_processes(square, range(20), 1))


def test_a_process_that_dies_ends_in_one_line():
    with pytest.raises(UserError, match=r"one of 1 processes died, .*use fewer"):
        list(in_processes(os._exit, [9], 1))


PARENT = """
import time
from ddlbench.data.processes import in_processes

def work(seconds):
    print("working", flush=True)
    time.sleep(seconds)

if __name__ == "__main__":
    list(in_processes(work, [90], 1))
"""


def test_no_process_outlives_its_parent(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "working\n"
        parent.kill()
        parent.communicate(timeout=WITHIN_S)  # ends when no process holds the pipe any more
