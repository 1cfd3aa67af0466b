"""CPU time, bytes and page faults are those of this process and its children; what a rank sends is counted as well."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddlbench.measure.devices import usage
from ddlbench.measure.devices.usage import ReadBytes, SentBytes, process_tree_seconds
from tests.support.ranks import run_ranks

LOOK_BYTES = 2_000  # of a few files in /proc of one process
BUSY = """import time
while time.process_time() < 0.3: pass
print(len(open("/dev/zero", "rb", 0).read(2_000_000)), flush=True)
"""


def test_reading_is_counted(tmp_path: Path) -> None:
    """The least of several counts: pytest's own connection to its parent is read as well."""
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    counts: list[int] = []
    for _ in range(6):
        before = ReadBytes.now()
        (tmp_path / "file").read_bytes()
        counts.append(ReadBytes.now().since(before) or 0)
    assert 3_000_000 <= min(counts) < 3_000_000 + LOOK_BYTES


def sent_in_all_reduces(count: int, megabytes: int) -> int | None:
    """Bytes that this rank sent."""
    numbers = torch.ones(megabytes * 2**18)
    dist.all_reduce(numbers)  # makes the connections
    dist.barrier()
    before = SentBytes.now()
    for _ in range(count):
        dist.all_reduce(numbers)
    dist.barrier()
    return SentBytes.now().since(before)


def test_what_a_rank_sends_is_what_a_ring_sends() -> None:
    """Patarasuk and Yuan 2009: 2 (P - 1) / P of n bytes; here of five times 4 MiB among three ranks."""
    assert run_ranks(3, sent_in_all_reduces, 5, 4) == [pytest.approx(5 * 2**22 * 4 / 3, rel=0.01)] * 3


def test_counting_what_was_sent_reads_nothing() -> None:
    """In mode=loader it would count as bytes of the data set. The least of several: as in the test of reading."""
    idle, counting = list[int](), list[int]()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        for counts, work in 6 * ((idle, dict[str, int]), (counting, lambda: SentBytes.now().counts)):
            before = ReadBytes.now()
            work()
            counts.append(ReadBytes.now().since(before) or 0)
        assert SentBytes.now().counts
    assert min(counting) == min(idle)


def test_a_connection_that_was_closed_makes_the_bytes_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        before = SentBytes.now()
        sender.sendall(bytes(30_000))
        assert len(receiver.recv(30_000, socket.MSG_WAITALL)) == 30_000
        with socket.create_connection(server.getsockname()) as late, server.accept()[0] as other:
            late.sendall(bytes(7))
            assert len(other.recv(7, socket.MSG_WAITALL)) == 7
            # The new one counts from its beginning, which has one more byte (tcp(7): its SYN).
            assert SentBytes.now().since(before) in range(30_007, 30_009)
        receiver.close()
        sender.close()
        assert SentBytes.now().since(before) is None


def test_sleeping_is_not_counted() -> None:
    cpu_s = process_tree_seconds()
    time.sleep(0.3)
    assert process_tree_seconds() - cpu_s < 0.25


def test_the_bytes_of_the_reading_itself_are_not_counted() -> None:
    """It reads a little of every process: on a busy node more than a loader of text does. Other processes begin and end
    between two readings, so the least of several counts."""
    others = [subprocess.Popen(["sleep", "600"]) for _ in range(50)]
    try:
        readings = [ReadBytes.now() for _ in range(6)]
    finally:
        for other in others:
            other.kill()
            other.wait()
    read = [abs(late.since(early) or 0) for early, late in pairwise(readings)]
    assert min(read) < LOOK_BYTES
    assert min(reading.overhead for reading in readings) > LOOK_BYTES


@pytest.mark.parametrize("ended", [True, False])
def test_a_child_counts_while_it_runs_and_after_its_end(ended: bool) -> None:
    before, cpu_s = ReadBytes.now(), process_tree_seconds()
    wait = "" if ended else "input()"
    child = subprocess.Popen([sys.executable, "-c", BUSY + wait], stdin=-1, stdout=-1, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    if ended:
        child.wait(20)
    read, computed_s = ReadBytes.now().since(before), process_tree_seconds() - cpu_s
    child.communicate("\n", 20)
    assert computed_s >= 0.28
    assert read is not None
    assert read >= 2_000_000


def test_a_counter_that_the_kernel_hides_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_read_bytes", lambda pid: None)
    assert ReadBytes.now().since(ReadBytes(5)) is None
