"""Rank, world size and rendezvous address from the environment variables of each launcher: one function per launcher.
No torch is imported, so that a wrong start is reported at once.

Variables: torchrun's documentation; Open MPI's and Hydra's own (seen under Open MPI 4.1, MPICH 4.0); horovodrun's own
(Horovod 0.28.1 over Gloo; over MPI it is mpirun); srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ddlbench.errors import UserError

FIRST_PORT, PORTS = 20_000, 12_000  # below 32768, where Linux's ports for outgoing connections begin
STEPS = 16  # ports of each Slurm job: the steps of one job and of the next 749 do not clash
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OPEN_MPI = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
HOROVOD = "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
HYDRA = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"  # MPICH, Intel MPI, MVAPICH
PMIX_RANK = "PMIX_RANK"  # of Open MPI 5, and of srun --mpi=pmix
# Prefixes of the variables by which torchrun, srun, mpirun and horovodrun tell a process its place.
PLACE_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI",
    "MPI_LOCAL", "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_", "HOROVOD_HOSTNAME", "HOROVOD_LOCAL_", "HOROVOD_RANK",
    "HOROVOD_SIZE",
)  # fmt: skip
SETTING_VARIABLES = ("HOROVOD_", "OMPI_", "SLURM_")  # those of launchers that also say how a run computes
# For tests of correctness (streams, collectives, mixed precision, faults): several ranks share a GPU. NCCL refuses two
# ranks with the same GPU on the same host; ranks with different host names (NCCL_HOSTID) communicate through sockets.
# Two and four ranks trained so on one H100 (docs/measurements/2026-11-27-nccl.md).
SHARED_GPU = "cuda:nccl"


@dataclass(frozen=True)
class Launch:
    """Rank, sizes and rendezvous address of one process. UserError for numbers that contradict each other.

    nodes: as the launcher says; mpirun and horovodrun do not, there it is world_size / local_world_size, rounded up:
        other nodes may have other numbers of ranks, and `Attempt.count_nodes` asks all ranks
    master_port: 0 where there is only one rank
    """

    launcher: str  # torchrun | srun | mpirun | horovodrun | alone
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    nodes: int = 1
    master_addr: str = "localhost"
    master_port: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size):
            raise UserError(
                f"{self.launcher}: rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size} contradict each other: unset the variables that the shell exports"
            )
        if not 0 <= self.master_port < 1 << 16:
            raise UserError(f"MASTER_PORT={self.master_port} is not a port: choose one below 65536, or unset it")


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one of the ranks of this host, as torchrun sets it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port of this host for a rendezvous. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def detect(env: Mapping[str, str] = os.environ) -> Launch:
    """This rank's place, from `env` alone (except a port under Hydra on one node). UserError for missing or
    contradictory variables.

    The order matters: inside a Slurm job torchrun's agents and mpirun's daemons are themselves started by srun, and
    their ranks inherit the step's variables, which count agents and daemons.
    """
    # A shell or a container's hook around mpirun or srun may have set RANK=0 WORLD_SIZE=1: each of its ranks would run
    # alone.
    several = any(names[2] in env and env.get(names[1]) != "1" for names in (HOROVOD, OPEN_MPI, HYDRA))
    several = several or env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    around = several and env.get("WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in env
    if "RANK" in env and "WORLD_SIZE" in env and not around:
        # NVIDIA's hook for enroot sets them in PyTorch images, to those of the Slurm step and without LOCAL_WORLD_SIZE.
        # The step's own variables say more.
        of_step = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")) == (env["RANK"], env["WORLD_SIZE"])
        return srun(env) if of_step and "TORCHELASTIC_RUN_ID" not in env else torchrun(env)
    if HOROVOD[0] in env:
        return horovodrun(env)
    for names in (OPEN_MPI, HYDRA):
        if names[2] in env:
            return mpirun(env, *names)
    if "SLURM_STEP_NUM_TASKS" in env:  # a batch script has SLURM_PROCID too, but is no step
        return srun(env)
    for name in ("RANK", "WORLD_SIZE", HYDRA[0], PMIX_RANK):
        if name in env:  # else N runs of one process each would start
            raise UserError(
                f"{name}={env[name]} is set, but not the rest of what torchrun, mpirun or srun would set: "
                f"start with one of them, or unset {name}"
            )
    return Launch("alone")


def hint(launch: Launch, env: Mapping[str, str] = os.environ) -> str | None:
    """A remark on what the user may have forgotten; it is not an error."""
    tasks = env.get("SLURM_NTASKS", "1")
    if launch.world_size == 1 and tasks != "1":
        return f"one process in a Slurm job of {tasks} tasks: put srun before python to use them all"
    return None


def torchrun(env: Mapping[str, str]) -> Launch:
    """torchrun, or RANK, WORLD_SIZE and the like set by hand."""
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in env:
        for theirs, size in (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), OPEN_MPI[:2], HYDRA[:2]):
            if env.get(size) == str(world) and env.get(theirs) != str(rank):
                raise UserError(f"RANK={rank} but {theirs}={env.get(theirs)}: unset RANK and WORLD_SIZE")
    address = env.get("MASTER_ADDR", "localhost") if world == 1 else _text(env, "MASTER_ADDR")
    local_rank: int | None = None
    local_world: int | None = None
    if world == 1 or address in LOOPBACK:
        local_rank, local_world = rank, world
    elif not ((rank and address == socket.gethostname()) or "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env):
        local_rank, local_world = 0, 1  # one rank a pod: Kubeflow's PyTorchJob sets RANK, WORLD_SIZE and MASTER_ alone
    local_world = _number(env, "LOCAL_WORLD_SIZE", local_world)
    return Launch(
        "torchrun",
        rank,
        world,
        _number(env, "LOCAL_RANK", local_rank),
        local_world,
        _number(env, "GROUP_WORLD_SIZE", _nodes(world, local_world)),
        address,
        _number(env, "MASTER_PORT", 0 if world == 1 else None),
    )


def mpirun(env: Mapping[str, str], *names: str) -> Launch:
    rank, world, local_rank, local_world = (_number(env, name) for name in names)
    nodes = _nodes(world, local_world)
    job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")  # Open MPI 4, 5: the same on all nodes
    if nodes > 1 and not (env.get("MASTER_ADDR") and (job or env.get("MASTER_PORT"))):
        raise UserError(
            f"{world} ranks, {local_world} of them on this node, have no rendezvous address: give the first node, "
            "mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=<port> (MPICH, Intel MPI: -genv MASTER_ADDR <host> ...)"
        )
    address = env.get("MASTER_ADDR") or "localhost"
    port = _number(env, "MASTER_PORT") if env.get("MASTER_PORT") else _port(zlib.crc32((job or _proxy()).encode()))
    return Launch("mpirun", rank, world, local_rank, local_world, nodes, address, port)


def _proxy() -> str:
    """The process that started the ranks of this node: Hydra gives each rank a session of its own, whose leader (the
    rank, or a script around it) is that process's child."""
    import psutil

    try:
        return str(psutil.Process(os.getsid(0)).ppid())
    except psutil.Error:  # the session began outside this container
        return str(os.getppid())


def horovodrun(env: Mapping[str, str]) -> Launch:
    """Over Gloo. horovodrun names its own address and port: rank 0 is taken to run on the same node."""
    rank, world, local_rank, local_world = (_number(env, name) for name in HOROVOD)
    address = "localhost" if local_world == world else _text(env, "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = _number(env, "MASTER_PORT", _port(_number(env, "HOROVOD_GLOO_RENDEZVOUS_PORT")))
    address, nodes = env.get("MASTER_ADDR") or address, _nodes(world, local_world)
    return Launch("horovodrun", rank, world, local_rank, local_world, nodes, address, port)


def srun(env: Mapping[str, str]) -> Launch:
    world, node = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_NODEID")
    tasks = tasks_per_node(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    if sum(tasks) != world or node >= len(tasks):
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={world} and SLURM_NODEID={node} contradict "
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}: start with srun from a fresh shell"
        )
    return Launch(
        "srun",
        _number(env, "SLURM_PROCID"),
        world,
        _number(env, "SLURM_LOCALID"),
        tasks[node],
        len(tasks),
        env.get("MASTER_ADDR") or first_host(_text(env, "SLURM_STEP_NODELIST")),
        _number(env, "MASTER_PORT", _port(STEPS * _number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID"))),
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length list, one number per node: "2(x3),1" -> [2, 2, 2, 1]."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item) for item in text.split(",")]
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def first_host(hosts: str) -> str:
    """First name of a Slurm host list, where rank 0 runs: "rack[2-3]n[07-09,12],login1" -> "rack2n07".

    The rest of the syntax does not matter for it, so scontrol is not needed: containers often have none.
    """
    first = re.split(r",(?![^\[]*\])", hosts, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _nodes(world: int, local_world: int) -> int:
    return -(-world // max(1, local_world))


def _port(job: int) -> int:
    return FIRST_PORT + job % PORTS


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise UserError(f"{name} is not set by the launcher: start with torchrun, srun or mpirun")
    return env[name]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a number: unset it, or start with torchrun, srun or mpirun")
    return int(text)
