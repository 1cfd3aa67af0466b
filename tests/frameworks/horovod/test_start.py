"""The rank, local rank and addresses of Horovod's processes, without horovodrun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddlbench.frameworks.horovod.adapter import Horovod, horovod_torch
from ddlbench.frameworks.horovod.start import meeting, places, started_by_mpi
from ddlbench.frameworks.shared.environment import environment
from tests.support.equal import make_job
from tests.support.jobs import CASE
from tests.support.libraries import why_no_horovod
from tests.support.ranks import run_ranks
from tests.support.waiting import WITHIN_S


def test_places_of_five_ranks_on_three_hosts() -> None:
    hosts = ["a", "b", "a", "c", "b"]
    result = [places(hosts, rank) for rank in range(5)]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    assert [tuple(place[f"HOROVOD_{name}"] for name in names) for place in result] == [
        ("0", "5", "0", "2", "0", "3", "a"),
        ("1", "5", "0", "2", "1", "3", "b"),
        ("2", "5", "1", "2", "0", "2", "a"),
        ("3", "5", "0", "1", "2", "3", "c"),
        ("4", "5", "1", "2", "1", "2", "b"),
    ]


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    with environment({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_RANK": "0"}):
        assert (os.environ["HOROVOD_CYCLE_TIME"], os.environ["HOROVOD_RANK"]) == ("1", "0")
    assert os.environ["HOROVOD_CYCLE_TIME"] == "2"
    assert "HOROVOD_RANK" not in os.environ


def test_torchruns_ranks_are_not_mpis(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not started_by_mpi()
    monkeypatch.setenv("PMIX_RANK", "0")
    assert started_by_mpi()
    monkeypatch.setenv("RANK", "0")
    assert not started_by_mpi()


def start_twice() -> tuple[list[tuple[int, int, int]], str | None, dict[str, str]]:
    """Size, rank and local rank of Horovod started twice in the same process, what it leaves in the environment, and
    the addresses at which its ranks connect."""
    places = [] if why_no_horovod() else [started(), started()]
    left = os.environ.get("HOROVOD_RANK")
    os.environ["GLOO_SOCKET_IFNAME"] = "ib0,eth0"
    return places, left, meeting(1234)


def started() -> tuple[int, int, int]:
    framework = Horovod()
    trainer = framework.setup(make_job(CASE))
    hvd = horovod_torch()
    result = hvd.size(), hvd.rank(), hvd.local_rank()
    trainer.close()
    return result


@pytest.mark.slow
def test_ranks_connect_again_at_the_same_addresses() -> None:
    ranks = run_ranks(2, start_twice)
    assert [meeting for _, _, meeting in ranks] == 2 * [
        {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "ib0",
        }
    ]
    if why_no_horovod() is None:  # each start finds the ranks of the launch
        assert [places for places, _, _ in ranks] == [[(2, 0, 0)] * 2, [(2, 1, 1)] * 2]
        assert {left for _, left, _ in ranks} == {None}


ABORTED = """
import ctypes, os, threading, time
from ddlbench.frameworks.horovod.start import delayed_abort

with delayed_abort():
    threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
    time.sleep(0.5)
    os._exit(3)
"""


def test_an_abort_while_horovod_starts_leaves_time_to_record_the_end() -> None:
    assert subprocess.run([sys.executable, "-c", ABORTED], timeout=WITHIN_S).returncode == 3
