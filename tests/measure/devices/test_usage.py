"""CPU time and bytes are those of this process and its children; what a rank sends, and how busy its node is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddlbench.measure.devices import usage
from ddlbench.measure.devices.usage import HZ, Load, ReadBytes, SentBytes, process_tree_seconds
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


def proc(folder: Path, stat: str, load: str = "3.00 2.00 1.00 1/100 42\n", some: float = 25.0) -> Path:
    (folder / "pressure").mkdir(parents=True)
    (folder / "loadavg").write_text(load)
    (folder / "stat").write_text(f"cpu  {stat}\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    lines = f"some avg10={some:.2f} avg60=90.00 avg300=80.00 total=12\nfull avg10=99.00 avg60=0 avg300=0 total=0\n"
    (folder / "pressure" / "cpu").write_text(lines)
    return folder


def test_a_node_with_known_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    # user nice system idle iowait irq softirq steal guest guest_nice
    before = Load.now(proc(tmp_path / "a", "100 10 20 800 5 1 4 60 50 5"))
    # Guests' ticks are in user and nice.
    assert before == Load(load=0.75, pressure=0.25, ticks=(60, 135, 1000))
    after = Load.now(proc(tmp_path / "b", "150 10 20 840 5 1 4 70 90 5"))
    assert after.shares_since(before) == (10 / 100, None)


def test_a_value_that_the_kernel_does_not_report_is_none(tmp_path: Path) -> None:
    nothing = Load.now(tmp_path)
    assert nothing == Load(None, None, None)
    assert nothing.shares_since(nothing) == (None, None)
    assert Load(0.0, 0.0, (5, 0, 10)).shares_since(Load(0.0, 0.0, (5, 0, 10))) == (None, None)  # no time has passed


def test_what_others_computed_is_all_that_was_computed_less_the_runs_own() -> None:
    seconds = 2.0
    before = Load(None, None, ticks=(0, 4_000, 10_000), own_s=30.0)
    after = Load(None, None, ticks=(0, 4_500, 11_000), own_s=30.0 + seconds)
    assert after.shares_since(before) == (0, pytest.approx((500 - seconds * HZ) / 1000))
    assert replace(after, own_s=99.0).shares_since(before) == (0, 0)  # ticks are coarse
    for unknown, steal in (({"own_s": None}, 0), ({"ticks": None}, None)):
        assert replace(after, **unknown).shares_since(before) == (steal, None)
        assert after.shares_since(replace(before, **unknown)) == (steal, None)


def process(proc: Path, name: str, ticks: str, children: str | None) -> None:
    """ticks: utime stime cutime cstime"""
    task = proc / name / "task" / name
    task.mkdir(parents=True)
    (proc / name / "stat").write_text(f"{name} (a name) with ) R 1 1 1 0 -1 4194304 0 0 0 0 {ticks} 20 0 1 0 5 6 7")
    if children is not None:
        (task / "children").write_text(children)


def test_seconds_of_a_process_with_its_children(tmp_path: Path) -> None:
    process(tmp_path, "self", "100 20 30 4", "7 8 9 ")
    process(tmp_path, "7", "1000 0 0 0", "10 ")
    process(tmp_path, "8", "5 0 0 0", None)  # it ended while it was read
    process(tmp_path, "10", "0 2000 0 0", "")
    assert process_tree_seconds(tmp_path) == pytest.approx((154 + 1000 + 2000) / HZ)
    with pytest.raises(FileNotFoundError):  # a kernel without these lists: the children would be taken for others
        process_tree_seconds(tmp_path, "8")


def test_a_thread_that_ends_while_the_children_are_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a loader end beside the training thread, which reads: the sum is known all the same."""
    process(tmp_path, "self", "100 20 30 4", "7 ")
    process(tmp_path, "7", "1000 0 0 0", "")
    ended = tmp_path / "self" / "task" / "99" / "children"
    ended.parent.mkdir()
    ended.touch()
    read_text = Path.read_text

    def read(path: Path) -> str:
        if path == ended:
            raise ProcessLookupError
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    assert process_tree_seconds(tmp_path) == pytest.approx((154 + 1000) / HZ)
