"""The store through which ranks find each other: on one network interface where MASTER_ADDR names one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ddlbench.ranks.launchers import Launch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def open_store(launch: Launch, timeout: timedelta, env: Mapping[str, str] = os.environ) -> Store:
    """Called by all ranks alike; errors are torch's own. Returns as soon as the store answers: not all ranks need to
    have come. Under torchrun its agent holds the store, else rank 0. Where MASTER_ADDR is the name of a host, rank 0
    listens on all interfaces, because a name can mean another interface on another node (many systems give a host's own
    name a loopback address)."""
    from torch._C._distributed_c10d import HashStore, TCPStore

    if launch.world_size == 1:
        return HashStore()
    holds = launch.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        holds,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_listen(launch) if holds and _is_address(launch.master_addr) else None,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(launch: Launch) -> int | None:
    """A socket that listens at this address alone; it becomes the store's. None where that cannot be: then torch tries,
    and says what is wrong."""
    address = launch.master_addr, launch.master_port
    family = socket.AF_INET6 if ":" in launch.master_addr else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN).detach()
    except OSError:
        return None
