"""Limits of the machine: each is reported, with a remark where it would stop a run."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddlbench.doctor import machine
from ddlbench.doctor.machine import adapters, launchers, limits, links, memory_limit, run, slurm
from ddlbench.texts import GIB, MIB, first_line
from tests.support.processes import program

UNLIMITED = resource.RLIM_INFINITY


MOST, TOTAL = (1024, 524_288), 24 * GIB
FEW_RANKS = "enough for about 337 ranks (sockets of rank 0): ask the administrator for a higher hard limit"
FILES, LOCKED, SHARED, CGROUP = (
    "open files (ulimit -Hn)", "locked memory (ulimit -l)", "shared memory (/dev/shm)", "memory cgroup",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "limit", "ports", "value", "remark"),
    [
        (FILES, MOST, [], "524,288, of which 524,276 are left", ""),  # a run raises the soft limit
        (FILES, (1024, 1024), [], "1,024, of which 1,012 are left", FEW_RANKS),
        (FILES, (1024, UNLIMITED), [], "unlimited", ""),
        (LOCKED, (8 * MIB, UNLIMITED), [], "8 MiB, can be raised to unlimited", ""),
        (LOCKED, (8 * MIB, 8 * MIB), ["mlx5_0: ACTIVE"], "8 MiB", "ulimit -l unlimited"),
        (LOCKED, (UNLIMITED, UNLIMITED), ["mlx5_0: ACTIVE"], "unlimited", ""),
        (SHARED, 64 * MIB, [], "64 MiB", "--shm-size=1g"),
        (SHARED, 24 * GIB, [], "24 GiB", ""),
        (CGROUP, None, [], "no limit", ""),
        (CGROUP, TOTAL, [], "no limit", ""),
        (CGROUP, 3 * GIB // 2, [], "1.5 GiB", "less than the machine's 24 GiB"),
    ],
)
def test_each_limit_is_reported_with_a_remark_where_it_would_stop_a_run(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: Any, ports: list[str], value: str, remark: str
) -> None:
    """limit: that of this name; the others stop no run."""
    here = {FILES: MOST, LOCKED: (UNLIMITED, UNLIMITED), SHARED: TOTAL, CGROUP: None} | {name: limit}
    ends = {resource.RLIMIT_NOFILE: here[FILES], resource.RLIMIT_MEMLOCK: here[LOCKED]}
    monkeypatch.setattr("resource.getrlimit", ends.__getitem__)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(num_fds=lambda: 12))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=TOTAL))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=here[SHARED]))
    monkeypatch.setattr(machine, "adapters", lambda: ports)
    monkeypatch.setattr(machine, "memory_limit", lambda: here[CGROUP])
    lines = {line: (shown, said) for line, shown, said in limits()}
    assert list(lines) == [FILES, LOCKED, SHARED, CGROUP]
    assert lines[name][0] == value
    assert remark in lines[name][1]
    assert [line for line, (_, said) in lines.items() if said] == ([name] if remark else [])


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_smallest_limit_of_a_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/slurm/job_7/step_0\n")
    write(tmp_path / "slurm/job_7/step_0/memory.max", "max\n")
    write(tmp_path / "slurm/job_7/memory.max", f"{2 * GIB}\n")
    write(tmp_path / "slurm/memory.max", f"{4 * GIB}\n")
    write(tmp_path.parent / "memory.max", "1\n")  # above the root of the cgroups
    assert memory_limit(tmp_path, own) == 2 * GIB


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "4:cpu:/elsewhere\n3:hugetlb,memory:/docker/a\n0::/\n")
    # Inside a container the group's own path is not there, but its top is the container's.
    limit = write(tmp_path / "memory/memory.limit_in_bytes", f"{3 * GIB}\n")
    assert memory_limit(tmp_path, own) == 3 * GIB
    limit.write_text("9223372036854771712\n")  # what the kernel writes for none
    assert memory_limit(tmp_path, own) is None


def test_the_report_lists_the_ports_of_adapters(tmp_path: Path) -> None:
    write(tmp_path / "mlx5_0/ports/1/state", "4: ACTIVE\n")
    write(tmp_path / "mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    assert adapters(tmp_path) == ["mlx5_0: ACTIVE, 400 Gb/sec (4X NDR)"]
    assert adapters(tmp_path / "none") == []


def test_an_alias_of_an_interface_has_no_speed_and_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    address = SimpleNamespace(family=socket.AF_INET, address="10.0.0.3")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [address], "eth0:1": [address]})
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True, speed=100)})
    networks = [text for name, text, _ in links() if name == "network"]
    assert networks == ["eth0: 10.0.0.3, 100 Mbit/s"]


@pytest.mark.parametrize(("address", "remarks"), [("127.0.1.1", True), (None, True), ("10.0.0.3", False)])
def test_a_host_name_with_a_loopback_address_is_reported(
    monkeypatch: pytest.MonkeyPatch, address: str | None, remarks: bool
) -> None:
    def look_up(name: str) -> str:
        if address is None:
            raise OSError("unknown host")
        return address

    monkeypatch.setattr("socket.gethostbyname", look_up)
    name, value, remark = links()[-1]
    assert name == "host name"
    assert bool(remark) == remarks
    assert f"is {address or 'unknown'}" in value


def test_how_this_process_was_started() -> None:
    assert launchers({})[0] == ("this process", "started alone", "")
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
                "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
    assert launchers(torchrun)[0][1] == "started by torchrun: rank 1 of 4 on 2 nodes"
    assert "put srun before python" in launchers({"SLURM_NTASKS": "8"})[0][2]
    assert "unset RANK" in launchers({"RANK": "0"})[0][2]


def test_answers_and_errors_of_slurm_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a machine without Slurm, and answers that are not UTF-8."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm({}) == [("srun", "not found: Slurm cannot start ranks here", "")]
    program(tmp_path / "srun", "#!/bin/sh\nprintf 'universit\\351 23.11\\n'\n")
    assert slurm({}) == [("srun", r"universit\xe9 23.11", "")]
    program(tmp_path / "srun", "#!/bin/sh\necho slurm 23.11.4\n")
    program(tmp_path / "sinfo", "#!/bin/sh\necho 'debug: 2 nodes of 4 cores'\n")
    assert slurm({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}) == [
        ("srun", "slurm 23.11.4", ""),
        ("partition", "debug: 2 nodes of 4 cores", ""),
        ("slurm job", "7 of 2 tasks", ""),
    ]
    program(tmp_path / "sinfo", "#!/bin/sh\necho no controller >&2\nexit 1\n")
    assert slurm({})[1:] == [("partition", "unknown", "sinfo failed: no controller")]
    program(tmp_path / "srun", "#!/bin/sh\necho no configuration >&2\nexit 1\n")
    assert slurm({}) == [("srun", "does not work", "no configuration")]


def test_a_command_that_does_not_end_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddlbench.doctor.machine.PATIENCE_S", 0.1)
    done, said = run("sleep", "10")
    assert not done
    assert "timed out" in said
    assert run("no-such-program")[0] is False
    assert first_line("\n \n") == "no message"
