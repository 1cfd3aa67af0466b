"""Limits and connections of this machine, as lines for `python -m ddlbench.doctor`: name, value, remark.

A remark says what will go wrong, and the remedy. Sources: getrlimit(2), cgroups(7), sinfo(1), and for shared and
locked memory the troubleshooting page of NCCL's user guide.
"""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import psutil

from ddlbench.errors import UserError
from ddlbench.measure.devices.unknown import or_none
from ddlbench.ranks.launchers import detect, hint
from ddlbench.texts import GIB, bytes_text, counted, first_line

Line = tuple[str, str, str]

FILES_PER_RANK = 3  # open files of rank 0, for each rank (docs/clusters.md)
MANY_RANKS = 1024
SMALL_SHARED_MEMORY = GIB  # the default of a container is 64 MiB
NO_LIMIT = 2**60  # cgroups v1 write the largest multiple of a page
PATIENCE_S = 5.0
PARTITIONS_SHOWN = 8
INFINIBAND = Path("/sys/class/infiniband")


def limits() -> list[Line]:
    """Limits that end or slow down a correct run."""
    # The hard limit of open files, to which each rank raises the soft one as it connects.
    unlimited, (_, most) = resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_NOFILE)
    left = most - psutil.Process().num_fds()
    files = "unlimited" if most == unlimited else f"{most:,}, of which {left:,} are left"
    ranks = math.inf if most == unlimited else left // FILES_PER_RANK
    few = f"enough for about {ranks:,} ranks (sockets of rank 0): ask the administrator for a higher hard limit"
    # Of locked memory the soft limit, and the hard one where it can be raised.
    ends = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = ("unlimited" if number == unlimited else bytes_text(number) for number in ends)
    locked = soft if soft == hard else f"{soft}, can be raised to {hard}"
    fails = ends[0] != unlimited and bool(or_none(adapters))
    locks = "InfiniBand locks its buffers in memory and will fail: ulimit -l unlimited"
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    small = "NCCL and loader workers pass data through it: start the container with --ipc=host or --shm-size=1g"
    total = psutil.virtual_memory().total
    allowed = min(or_none(memory_limit) or total, total)
    kills = f"less than the machine's {bytes_text(total)}: the kernel kills processes above it, also loader workers"
    return [
        ("open files (ulimit -Hn)", files, few if ranks < MANY_RANKS else ""),
        ("locked memory (ulimit -l)", locked, locks if fails else ""),
        ("shared memory (/dev/shm)", bytes_text(shared), small if shared < SMALL_SHARED_MEMORY else ""),
        ("memory cgroup", bytes_text(allowed), kills) if allowed < total else ("memory cgroup", "no limit", ""),
    ]


def memory_limit(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes this process's cgroup (version 1 or 2) and those above it allow; None: no limit."""
    limits: list[int] = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = top / path.lstrip("/")
        files = [above / name for above in (group, *group.parents) if above.is_relative_to(top)]
        limits += [int(text) for file in files if file.exists() and (text := file.read_text().strip()).isdecimal()]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def links() -> list[Line]:
    """How GPUs and nodes are connected."""
    rows: list[Line] = []
    if shutil.which("nvidia-smi") is not None:  # the matrix of `nvidia-smi topo -m`, without its legend
        matrix = re.sub(r"\x1b\[[\d;]*m", "", run("nvidia-smi", "topo", "-m")[1]).partition("Legend")[0]
        lines = [line.expandtabs().rstrip() for line in matrix.splitlines() if line.strip()]
        rows += [("" if number else "gpus", line, "") for number, line in enumerate(lines)]
    rows += [("infiniband", adapter, "") for adapter in or_none(adapters) or []]
    speeds = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():  # interfaces with an address that other nodes could reach
        of_ipv4 = [address.address for address in addresses if address.family == socket.AF_INET]
        reachable = [address for address in of_ipv4 if not ip_address(address).is_loopback]
        if reachable and name in speeds and speeds[name].isup:  # an alias (eth0:1) has none
            speed = f", {speeds[name].speed:,} Mbit/s" if speeds[name].speed else ""
            rows.append(("network", f"{name}: {', '.join(reachable)}{speed}", ""))
    host = socket.gethostname()
    address = or_none(lambda: socket.gethostbyname(host))  # gloo offers it to the other ranks
    local = address is None or ip_address(address).is_loopback
    remark = "other nodes cannot reach it: export GLOO_SOCKET_IFNAME=<interface> for runs on several nodes"
    return [*rows, ("host name", f"{host} is {address or 'unknown'}", remark if local else "")]


def adapters(folder: Path = INFINIBAND) -> list[str]:
    """InfiniBand and RoCE ports: "mlx5_0: ACTIVE, 400 Gb/sec (4X NDR)"."""
    ports = sorted(folder.glob("*/ports/*"))
    state = {port: (port / "state").read_text().split(":")[-1].strip() for port in ports}
    return [f"{port.parts[-3]}: {state[port]}, {(port / 'rate').read_text().strip()}" for port in ports]


def launchers(env: Mapping[str, str] = os.environ) -> list[Line]:
    """How this process was started, and how ranks can be started here."""
    try:
        launch = detect(env)
        ranks = f"rank {launch.rank} of {launch.world_size} on {counted(launch.nodes, 'node')}"
        started = "started alone" if launch.launcher == "alone" else f"started by {launch.launcher}: {ranks}"
        remark = hint(launch, env) or ""
    except UserError as error:
        started, remark = "started in a way that a run would refuse", str(error)
    beside = Path(sys.executable).with_name("torchrun")
    torchrun = str(beside) if beside.exists() else shutil.which("torchrun") or "python -m torch.distributed.run"
    rows = [("this process", started, remark), ("torchrun", torchrun, ""), _program("mpirun", "MPI")]
    return [*rows, *slurm(env)]


def slurm(env: Mapping[str, str]) -> list[Line]:
    rows = [_program("srun", "Slurm")]
    if shutil.which("sinfo") and not rows[0][2]:
        succeeded, answer = run("sinfo", "--noheader", "--format=%R: %D nodes of %c cores, %m MB, %G, %l at most")
        lines = [line.strip() for line in answer.splitlines()[:PARTITIONS_SHOWN]] if succeeded else []
        rows += [("partition", line, "") for line in lines]
        rows += [] if succeeded else [("partition", "unknown", f"sinfo failed: {first_line(answer)}")]
    if "SLURM_JOB_ID" in env:
        rows.append(("slurm job", f"{env['SLURM_JOB_ID']} of {env.get('SLURM_NTASKS', '?')} tasks", ""))
    return rows


def _program(name: str, what: str) -> Line:
    """The first line of a launcher's version; a remark if it is installed but does not work."""
    if shutil.which(name) is None:
        return name, f"not found: {what} cannot start ranks here", ""
    succeeded, output = run(name, "--version")
    return (name, first_line(output), "") if succeeded else (name, "does not work", first_line(output))


def run(*command: str) -> tuple[bool, str]:
    """Whether a command succeeded in time, and its output (stderr if stdout is empty)."""
    try:
        process = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return process.returncode == 0, (process.stdout or process.stderr).decode(errors="backslashreplace")
