"""The device of a rank, the rendezvous store and the process group: the same for every launcher, with an explicit
timeout, also for a single rank."""

from __future__ import annotations

import gc
import ipaddress
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ddlbench.errors import RunError, UserError
from ddlbench.ranks.control import all_gather
from ddlbench.ranks.launchers import SHARED_GPU, Launch
from ddlbench.texts import counted, first_line

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # each library's network interface
# torch's NCCL watchdog and its monitor abort the process when they see an error, a hang of 8 minutes or a failed CUDA
# call: then no record would be written. `Supervisor` does the same after the record is written (ProcessGroupNCCL.cpp).
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
OLD_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}


class ConnectTimeout(RunError):
    """Not all ranks connected within the timeout."""

    status = "timeout"


@dataclass
class Cluster:
    """`cluster.`: the label of the machine in the record. The oracle's descriptions of machines are another thing."""

    name: str = "local"
    notes: str = ""


def pick_device(launch: Launch, backend: str | None = None) -> torch.device:
    """One GPU a rank, or the CPU where no GPU is visible. backend: that of `connect`."""
    visible = torch.cuda.device_count()
    if backend == SHARED_GPU and not visible:
        raise UserError(
            f"backend={backend} lets several ranks share one GPU to test that they compute the same, and no GPU "
            "is visible: set backend=null"
        )
    # Where one is visible, it may be this task's own (--gpus-per-task=1): `connect` finds out whether it is shared.
    if backend != SHARED_GPU and 1 < visible < launch.local_world_size:
        raise UserError(_too_few(launch.local_world_size, visible))
    return torch.device("cuda", launch.local_rank % visible) if visible else torch.device("cpu")


def _too_few(ranks: int, gpus: int) -> str:
    return (
        f"{ranks} ranks on this node but {counted(gpus, 'GPU')}: start one rank a GPU "
        f"(torchrun --nproc-per-node={gpus}, srun --ntasks-per-node={gpus}) or CUDA_VISIBLE_DEVICES= for the CPU"
    )


def connect(
    launch: Launch,
    device: torch.device,
    timeout_s: float,
    backend: str | None = None,
    reached: Callable[[Store], object] = lambda _: None,
) -> None:
    """Make the process group of all ranks: gloo for CPU tensors, NCCL for GPU tensors, `timeout_s` for both. NCCL has
    no communicator yet: a framework that needs one of all ranks makes it (frameworks/shared/groups.py).

    backend: SHARED_GPU, or None. reached: called with the rendezvous store as soon as this rank reaches it. Raises on
    every rank if two ranks of a host share a GPU, and ConnectTimeout if ranks are missing or the network interface is
    the wrong one.
    """
    # gloo opens a socket to every other rank of each group: the usual soft limit of 1,024 open files ends runs of about
    # 340 ranks (docs/clusters.md).
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit above the kernel's own fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if launch.world_size > 1 and launch.master_port == 0:
        raise UserError("MASTER_PORT=0 is no port that several ranks can agree on: choose one, or unset it")
    if backend == SHARED_GPU:
        os.environ["NCCL_HOSTID"] = f"rank {launch.rank}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo, for numbers alone, connects what it uses
    began, timeout = time.monotonic(), group_timeout(device, timeout_s)
    try:
        store = open_store(launch, timeout)
        reached(store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        if device.type == "cuda" and backend != SHARED_GPU:
            _refuse_shared_gpus(launch, device)
        first_operation(torch.device("cpu"))
    except RuntimeError as error:
        raise _connect_error(launch, time.monotonic() - began, timeout_s, str(error)) from error


def disable_nccl_abort(env: MutableMapping[str, str] = os.environ) -> None:
    """Called before the process group is made. What the user has set stays, except TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    under torchrun, which sets it for its ranks where the user has set nothing."""
    if "TORCHELASTIC_RUN_ID" in env and env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        del env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in NCCL_DEFAULTS.items():
        if OLD_NAMES.get(name, "") not in env:
            env.setdefault(name, value)


def open_store(launch: Launch, timeout: timedelta, env: Mapping[str, str] = os.environ) -> Store:
    """The store through which ranks find each other. All ranks call this; errors are those of torch. It returns as soon
    as the store answers: other ranks may still be missing.

    Under torchrun its agent holds the store, else rank 0. Rank 0 listens at MASTER_ADDR alone if that is an address. If
    it is the name of a host, rank 0 listens on all interfaces, because a name can mean another interface on another
    node (many systems give a host's own name a loopback address).

    The agent's store outlives ranks that have failed and that it starts again (--max-restarts): on one node the new
    ranks do not read what the old ones have left in it.
    """
    if launch.world_size == 1:
        return HashStore()
    holds = launch.rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        holds,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen(launch.master_addr, launch.master_port) if holds else None,
    )
    if launch.local_world_size < launch.world_size:
        return store  # the agents of several nodes do not count the same restarts
    return PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def listen(host: str, port: int) -> int | None:
    """A socket for the store that listens at this address alone. None for the name of a host, and if the socket cannot
    be made: torch then tries it and reports the error."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
    except (ValueError, OSError):
        return None


def group_timeout(device: torch.device, timeout_s: float) -> timedelta:
    """For every process group. NCCL's own timeout ends the process without a record: `Supervisor` must come first."""
    return timedelta(seconds=timeout_s + (60 if device.type == "cuda" else 0))


def is_fake() -> bool:
    """Whether the ranks do not exist (ranks/fake/fake.py): their collectives return no values that could be read."""
    return dist.get_backend() == "fake"


def first_operation(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Let a group (None: all ranks) make its communicator now: NCCL does it at the group's first operation. All ranks
    of the group call this; it returns when the operation has ended. A fake group (a rehearsal) has no communicator."""
    if is_fake():
        return
    one = torch.zeros(1, device=device)
    try:
        dist.all_reduce(one, group=group)
        one.item()
    except dist.DistBackendError as error:  # NCCL's
        interface = os.environ.get("NCCL_SOCKET_IFNAME", "(not set)")
        raise RuntimeError(
            "NCCL could not connect the ranks of a group: check that every node is reached by the interface "
            f"NCCL_SOCKET_IFNAME={interface}; NCCL_DEBUG=INFO prints more\n{error}"
        ) from error


def _connect_error(launch: Launch, waited_s: float, timeout_s: float, error: str) -> RunError:
    place = f"{launch.master_addr}:{launch.master_port}"
    if "EADDRINUSE" in error:
        return UserError(f"the port of {place} is in use: choose another one with MASTER_PORT=<port>")
    chosen = {name: os.environ.get(name) for name in INTERFACES}
    if "Unable to find address for" in error:  # gloo's message for an interface that does not exist
        names = ", ".join(name for _, name in socket.if_nameindex())
        return UserError(
            f"GLOO_SOCKET_IFNAME={chosen['GLOO_SOCKET_IFNAME']} is not a network interface with an address on "
            f"{socket.gethostname()}: choose one of {names}, or unset it"
        )
    network = ", ".join(f"{name}={value}" if value else f"{name} (not set)" for name, value in chosen.items())
    return ConnectTimeout(
        f"rank {launch.rank} of {launch.world_size} could not connect to the other ranks through {place} in "
        f"{waited_s:.0f} s (train.timeout_s={timeout_s:g}): check that every rank started, and that rank 0's node is "
        f"reached by MASTER_ADDR={launch.master_addr} and by the interfaces {network} "
        f"({first_line(error)})"
    )


def _refuse_shared_gpus(launch: Launch, device: torch.device) -> None:
    gpus = all_gather(str(torch.cuda.get_device_properties(device).uuid))
    why = "each is alone on its node by its variables: set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun"
    why = why if launch.local_world_size == 1 else _too_few(launch.local_world_size, 1)
    for rank, gpu in enumerate(gpus):
        if gpus.index(gpu) < rank:
            disconnect(clean=True)
            raise UserError(f"ranks {gpus.index(gpu)} and {rank} share a GPU: {why}")


def disconnect(clean: bool) -> None:
    """Destroy the process group; clean: all ranks call this, so wait for them. Call it after the framework
    has dropped model and optimizer: gloo ranks that destroy the group of a living DDP model sometimes abort at exit."""
    if not dist.is_initialized():
        return
    if clean:
        dist.barrier()
    gc.collect()  # wrapped models hide in reference cycles
    dist.destroy_process_group()
