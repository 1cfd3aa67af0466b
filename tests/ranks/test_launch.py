"""Recorded environments of each launcher, and the launchers themselves."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddlbench.ranks.launch as launch_module
from ddlbench.errors import UserError
from ddlbench.ranks.control import barrier
from ddlbench.ranks.launch import ConnectTimeout, connect, pick_device
from ddlbench.ranks.launchers import SHARED_GPU, Launch, detect, first_host, hint, tasks_per_node
from ddlbench.run.peers import Peers
from tests.support.faults import end
from tests.support.meet import main as meet
from tests.support.processes import AS_ROOT, MEET, MPI, PYTHON, met, need, run
from tests.support.ranks import Forked, run_ranks


def env(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# Rank 5 of 2 nodes x 4.
TORCHRUN = env(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=node7 "
    "MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none"
)
# A batch script of `sbatch -N2 -n4 --ntasks-per-node=2` (Slurm 22.05).
BATCH = env(
    "SLURM_JOB_ID=3 SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0 "
    "SLURM_TASKS_PER_NODE=2(x2)"
)
# The last task of `srun -N2 -n3` in it.
SRUN = BATCH | env(
    "SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=node[1-2] "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1"
)
# The same task in NVIDIA's PyTorch image: enroot's hook 50-slurm-pytorch.sh adds these.
PYXIS = SRUN | env("RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=node1 MASTER_PORT=61003")
POD = env("RANK=1 WORLD_SIZE=4 MASTER_ADDR=job-master-0 MASTER_PORT=23456")  # of a PyTorchJob
OPEN_MPI = env(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_MCA_ess_base_jobid=2075131905 PMIX_RANK=1"
)
HYDRA = env("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
# Rank 3 of `horovodrun -np 4 -H node1:2,node2:2` (0.28.1).
HOROVODRUN = env(
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_CROSS_RANK=1 "
    "HOROVOD_CROSS_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=13005"
)
# What a shell, or NVIDIA's hook for enroot in a step of one task, sets around mpirun.
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
# What mpirun's daemon on node2, itself a task of srun, passes to its ranks.
DAEMON = SRUN | env(
    "SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=node2"
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch("alone", 0, 1, 0, 1, 1, "localhost", 0)),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, 2, "node7", 29400)),
        (TORCHRUN | SRUN, Launch("torchrun", 5, 8, 1, 4, 2, "node7", 29400)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"},
            Launch("torchrun", 1, 2, 1, 2, 1, "127.0.0.1", 1234),
        ),
        (BATCH, Launch("alone")),
        (SRUN, Launch("srun", 2, 3, 0, 1, 2, "node1", 20_000 + 3 * 16 + 1)),
        (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMIX_RANK": "2"}, detect(SRUN)),  # srun --mpi=pmix, pmi2
        (SRUN | {"MASTER_ADDR": "ib1", "MASTER_PORT": "9"}, Launch("srun", 2, 3, 0, 1, 2, "ib1", 9)),
        (PYXIS, Launch("srun", 2, 3, 0, 1, 2, "node1", 61003)),
        (POD, Launch("torchrun", 1, 4, 0, 1, 4, "job-master-0", 23456)),
        (
            POD | {"RANK": "0", "MASTER_ADDR": socket.gethostname()},  # of a PyTorchJob's master: the pod's own name
            Launch("torchrun", 0, 4, 0, 1, 4, socket.gethostname(), 23456),
        ),
        (SRUN | {"WORLD_SIZE": "4"}, detect(SRUN)),  # a habit of batch scripts, of no use without RANK
        (DAEMON | HYDRA | {"MASTER_ADDR": "node1", "MASTER_PORT": "9"}, Launch("mpirun", 3, 4, 1, 2, 2, "node1", 9)),
        (HOROVODRUN, Launch("horovodrun", 3, 4, 1, 2, 2, "10.0.0.1", 20_000 + 1_005)),
        (
            HOROVODRUN | {"HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_SIZE": "1"},
            Launch("horovodrun", 3, 4, 3, 4, 1, "localhost", 21_005),
        ),
        (  # -H node1:1,node2:3: no other node has a local rank 2, which the cross size counts
            HOROVODRUN | {"HOROVOD_LOCAL_RANK": "2", "HOROVOD_LOCAL_SIZE": "3", "HOROVOD_CROSS_SIZE": "1"},
            Launch("horovodrun", 3, 4, 2, 3, 2, "10.0.0.1", 21_005),
        ),
        (HOROVODRUN | SRUN | {"MASTER_ADDR": "ib1"}, Launch("horovodrun", 3, 4, 1, 2, 2, "ib1", 21_005)),
        (OPEN_MPI | {"MASTER_PORT": "9"}, Launch("mpirun", 1, 2, 1, 2, 1, "localhost", 9)),
        (OPEN_MPI | ALONE | {"MASTER_PORT": "9"}, Launch("mpirun", 1, 2, 1, 2, 1, "localhost", 9)),
        (HOROVODRUN | ALONE, detect(HOROVODRUN)),
        (SRUN | ALONE, detect(SRUN)),
        (DAEMON | HYDRA | ALONE | env("MASTER_ADDR=a MASTER_PORT=9"), Launch("mpirun", 3, 4, 1, 2, 2, "a", 9)),
        (OPEN_MPI | ALONE | {"TORCHELASTIC_RUN_ID": "none"}, Launch("torchrun")),
    ],
)
def test_every_launcher_is_known_by_its_variables(variables, expected):
    assert detect(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but not the rest"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but not the rest"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set, but not the rest"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8, local rank 1 of 4 contradict"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "rank 5 of 8, local rank 4 of 4 contradict"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK is not set by the launcher"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set by the launcher"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        (PYXIS | {"WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE is not set by the launcher"),
        (POD | {"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not set by the launcher"),
        (POD | {"MASTER_ADDR": socket.gethostname()}, "LOCAL_WORLD_SIZE is not set by the launcher"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "3"}, "RANK=0 but SLURM_PROCID=2: unset RANK"),
        (OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 but OMPI_COMM_WORLD_RANK=1: unset RANK"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_NUM_TASKS=3 and SLURM_NODEID=1 contradict"),
        (SRUN | {"SLURM_PROCID": ""}, "SLURM_PROCID is not set by the launcher"),
        ({"HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}, "HOROVOD_SIZE is not set by the launcher"),
        (DAEMON | HYDRA, r"4 ranks, 2 of them on this node, .* mpirun -x MASTER_ADDR="),
        (DAEMON | HYDRA | {"MASTER_ADDR": "node1"}, "-x MASTER_PORT="),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "-x MASTER_ADDR="),
    ],
)
def test_missing_and_contradictory_variables_are_refused(variables, message):
    with pytest.raises(UserError, match=message) as refusal:
        detect(variables)
    assert "\n" not in str(refusal.value)


def test_open_mpi_ranks_of_a_job_share_a_port_that_other_jobs_do_not():
    port = detect(OPEN_MPI).master_port
    assert port == detect(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port
    assert port != detect(OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "2075131906"}).master_port
    fifth = {name: value for name, value in OPEN_MPI.items() if "jobid" not in name}
    assert detect(fifth | {"PMIX_NAMESPACE": "prterun-a-1@1"}) != detect(fifth | {"PMIX_NAMESPACE": "prterun-a-2@1"})


def test_slurm_steps_have_ports_of_their_own_below_the_ephemeral_ones():
    steps = [SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(9, 759) for step in (0, 15)]
    ports = {detect(each).master_port for each in steps}
    assert len(ports) == 750 * 2
    assert (min(ports), max(ports)) == (20_000, 31_999)
    interactive = detect(SRUN | {"SLURM_STEP_ID": "4294967290"})
    assert 20_000 <= interactive.master_port < 32_000


@pytest.mark.parametrize(
    ("text", "numbers"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("3,1(x2)", [3, 1, 1]), ("2,4,2", [2, 4, 2])]
)
def test_tasks_per_node(text, numbers):
    assert tasks_per_node(text) == numbers


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("n[007-011,3],login2", "n007"),
        ("rack[2-3]n[07-09,12],gpu1", "rack2n07"),
        ("b.example.org,a[1,3]", "b.example.org"),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


def test_hint_for_a_forgotten_srun():
    assert hint(detect(BATCH), BATCH) == "one process in a Slurm job of 4 tasks: put srun before python to use them all"
    assert hint(detect(SRUN), SRUN) is None
    assert hint(Launch("alone"), {}) is None


def test_one_gpu_a_rank(monkeypatch):
    visible = iter([*[4] * 8, *[8] * 8, *[1] * 8, 2, 0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: next(visible))
    ranks = [Launch("srun", rank, 8, rank % 4, 4, 2) for rank in range(8)]
    assert [pick_device(launch).index for launch in ranks] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [pick_device(launch).index for launch in ranks] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {pick_device(launch).index for launch in ranks} == {0}  # --gpus-per-task=1: connect looks which rank has it
    with pytest.raises(UserError, match=r"4 ranks on this node but 2 GPUs: start one rank a GPU .*--nproc-per-node=2"):
        pick_device(ranks[0])
    with pytest.raises(UserError, match=r"backend=cuda:nccl lets several ranks share one GPU .* set backend=null"):
        pick_device(ranks[0], SHARED_GPU)


def test_the_first_two_ranks_that_share_a_gpu_are_named(monkeypatch):
    gpus = iter([["a", "b", "c"], ["a", "b", "c", "b", "a"]])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(launch_module, "all_gather", lambda _: next(gpus))
    launch, device = Launch("srun", world_size=5), torch.device("cuda", 0)
    launch_module._refuse_shared_gpus(launch, device)
    with pytest.raises(UserError, match=r"^ranks 1 and 3 share a GPU: each is alone on its node by its variables"):
        launch_module._refuse_shared_gpus(launch, device)


def assert_two(launcher, ranks):
    names = ("launcher", "rank", "local_rank", "nodes", "sum")
    assert [tuple(rank[name] for name in names) for rank in ranks] == [(launcher, 0, 0, 1, 3), (launcher, 1, 1, 1, 3)]


def test_torchrun():
    ranks = met(run(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", MEET))
    assert_two("torchrun", ranks)
    given = ranks[0]["of_torch"]
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1", "torchrun's own, which is replaced"
    launch_module.disable_nccl_abort(given)
    assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.mpi
@pytest.mark.parametrize("mpirun", MPI)
def test_mpirun(mpirun):
    need({mpirun: MPI[mpirun]})
    assert_two("mpirun", met(run(mpirun, "-n", 2, PYTHON, MEET, **AS_ROOT)))


@pytest.mark.mpi
@pytest.mark.parametrize("mpirun", MPI)
def test_mpirun_jobs_choose_ports_apart(mpirun, tmp_path):
    """Also with a script between mpirun and python, which is then the parent of neither rank."""
    need({mpirun: MPI[mpirun]})
    script = tmp_path / "wrapper.sh"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    # With a space before it: mpirun may pass one rank's line on before the other's has its end.
    code = "from ddlbench.ranks.launchers import detect; print('', detect().master_port)"
    jobs = [run(mpirun, "-n", 2, script, PYTHON, "-c", code, **AS_ROOT) for _ in range(2)]
    assert [len(job.stdout.split()) for job in jobs] == [2, 2], [(job.stdout, job.stderr) for job in jobs]
    (first, second), (third, fourth) = (job.stdout.split() for job in jobs)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize(("rank", "address"), [(0, "127.0.0.1"), (1, "no.such.host.invalid"), (1, "127.0.0.9")])
def test_a_rank_that_reaches_no_other_ends_in_one_line_that_names_the_network(rank, address):
    """The other rank is missing, or the address is wrong: no process of this machine listens at 127.0.0.9."""
    launch = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": address, "MASTER_PORT": "28765", "NCCL_SOCKET_IFNAME": "ib0"}
    codes, (said,) = end([Forked(meet, 1.0, **launch, **place)])
    assert codes == [8]
    line = said.splitlines()[-1]
    reached = rf"rank {rank} of 2 could not connect to the other ranks through {address}:28765 in \d+ s"
    assert re.match(rf"{reached} \(train\.timeout_s=1\)", line)
    assert f"MASTER_ADDR={address} and by the interfaces GLOO_SOCKET_IFNAME (not set), NCCL_SOCKET_IFNAME=ib0" in line


def test_a_wrong_interface_of_one_rank_ends_both_in_one_line():
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "28767"}
    interfaces = ("lo", "nonexistent")
    ranks = [Forked(meet, 5.0, RANK=str(i), GLOO_SOCKET_IFNAME=name, **shared) for i, name in enumerate(interfaces)]
    codes, (first, second) = end(ranks)
    assert codes == [8, 2]
    assert re.search(
        r"^GLOO_SOCKET_IFNAME=nonexistent is not a network interface .*: choose one of .*\blo\b.*, or unset it$",
        second.splitlines()[-1],
    )
    assert "GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME (not set)" in first.splitlines()[-1]


def test_nccls_own_timeout_comes_after_that_of_the_supervisor():
    """NCCL would end the process without a record."""
    assert launch_module.group_timeout(torch.device("cpu"), 5.0) == timedelta(seconds=5)
    assert launch_module.group_timeout(torch.device("cuda"), 5.0) == timedelta(seconds=65)


def test_connecting_selects_the_only_visible_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    # On a GPU a group waits for a minute beyond its timeout; here rank 0 never comes.
    monkeypatch.setattr(launch_module, "group_timeout", lambda _, timeout_s: timedelta(seconds=timeout_s))
    launch = Launch("srun", 1, 2, 1, 2, 1, "localhost", 28768)
    with pytest.raises(ConnectTimeout):
        connect(launch, pick_device(launch), 1.0)
    assert asked == [torch.device("cuda", 0)]


@pytest.fixture
def connecting(monkeypatch):
    """Ranks "connect" on a machine with two GPUs; which of them looked for shared GPUs, and on which devices a first
    operation ran. The variables that `connect` sets go with the test."""
    looked, operations = [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(launch_module, "_refuse_shared_gpus", lambda launch, _: looked.append(launch.rank))
    monkeypatch.setattr(launch_module, "open_store", lambda *_: None)
    monkeypatch.setattr(launch_module, "first_operation", lambda device: operations.append(device.type))
    for name in ("NCCL_HOSTID", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.delenv(name, raising=False)
    return looked, operations


def test_a_port_that_the_system_would_choose_is_none_for_several_ranks(connecting):
    with pytest.raises(UserError, match="MASTER_PORT=0 is no port that several ranks can agree on"):
        connect(Launch("torchrun", 0, 2, 0, 2), torch.device("cpu"), 1.0)


def test_ranks_share_a_gpu_only_where_it_is_configured(connecting):
    """NCCL takes ranks with names of their own for ranks of different hosts."""
    looked, _ = connecting
    ranks = [Launch("srun", rank, 4, rank, 4, 1, "localhost", 28769) for rank in range(4)]
    connect(ranks[0], torch.device("cuda", 0), 1.0)
    assert (looked, os.environ.get("NCCL_HOSTID")) == ([0], None)
    assert [pick_device(launch, SHARED_GPU).index for launch in ranks] == [0, 1, 0, 1]
    names = []
    for launch in ranks:
        connect(launch, torch.device("cuda", 0), 1.0, SHARED_GPU)
        names.append(os.environ["NCCL_HOSTID"])
    assert (looked, len(set(names))) == ([0], 4)


def test_on_a_gpu_gloo_connects_what_is_used_and_nccl_nothing(connecting):
    connect(Launch("alone"), torch.device("cuda", 0), 1.0)
    assert (connecting[1], os.environ["TORCH_GLOO_LAZY_INIT"]) == (["cpu"], "1")


def test_a_group_that_nccl_cannot_connect_names_the_network_interface(monkeypatch):
    errors = iter([torch.distributed.DistBackendError("NCCL error: unhandled"), RuntimeError("Connection closed")])

    def failing(*_: object, **__: object) -> None:
        raise next(errors)

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    monkeypatch.setattr(torch.distributed, "all_reduce", failing)
    monkeypatch.setattr(launch_module, "is_fake", lambda: False)
    with pytest.raises(RuntimeError, match=r"NCCL_SOCKET_IFNAME=ib7; .*\nNCCL error: unhandled"):
        launch_module.first_operation(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"^Connection closed"):  # gloo's, also of a GPU's tensors
        launch_module.first_operation(torch.device("cpu"))


RANKS = 32


@pytest.mark.slow
def test_more_ranks_connect_than_the_soft_limit_of_open_files_allows():
    """With as many sockets as docs/clusters.md says."""
    result = run_ranks(RANKS, sockets, open_files=64)
    assert result == [(2 * RANKS + 2, 3 * RANKS + 3)] + [(RANKS + 1, RANKS + 2)] * (RANKS - 1)


def sockets():
    """The sockets of this rank, connected and then while it also watches the others."""
    connected = count_sockets()
    store: Any = dist.distributed_c10d._get_default_store()
    peers = Peers(store.clone(), dist.get_rank(), dist.get_world_size())
    training = count_sockets()
    peers.close()
    return connected, training


def count_sockets():
    barrier()
    count = sum("socket:" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())
    barrier()
    return count


def test_a_taken_port_ends_in_one_line():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        codes, (said,) = end([Forked(meet, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)])
    assert codes == [2]
    assert said.splitlines()[-1] == (
        f"the port of 127.0.0.1:{port} is in use: choose another one with MASTER_PORT=<port>"
    )


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_refused():
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    refused = run(*torchrun, MEET, CUDA_VISIBLE_DEVICES="0")
    assert refused.returncode != 0
    assert refused.stderr.count("ranks 0 and 1 share a GPU: 2 ranks on this node but 1 GPU: start one rank a GPU") == 2
    assert (
        "Traceback" not in re.split("torch.distributed.elastic", refused.stderr)[0]
    )  # torchrun's own has dots or slashes
