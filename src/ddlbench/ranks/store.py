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


def open_store(launch: Launch, timeout: timedelta, env: Mapping[str, str] = os.environ) -> Store | None:
    """Called by all ranks alike; errors are torch's own. None where torch is to open it: under torchrun, whose agent
    has opened one, and for the name of a host. It listens on all interfaces then, for a name can mean another interface
    on another node (many systems give a host's own name a loopback address)."""
    from torch._C._distributed_c10d import HashStore, TCPStore

    if launch.world_size == 1:
        return HashStore()
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_address(launch.master_addr):
        return None
    listens = _listen(launch.master_addr, launch.master_port) if launch.rank == 0 else None
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        launch.rank == 0,
        timeout,
        multi_tenant=True,
        master_listen_fd=listens,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(address: str, port: int) -> int | None:
    """A socket that listens at this address alone; it becomes the store's. None where that cannot be: then torch tries,
    and says what is wrong."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN).detach()
    except OSError:
        return None
