"""Faults that a cluster brings, under clusters of their own: what they break, no other test uses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest

from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.slurm.cluster import SCRIPTS, TINY, Slurm, numbers, records, started, sweep
from tests.support.processes import PYTHON
from tests.support.records import attempts_of
from tests.support.waiting import wait_until
from tests.sweep.studies import KEYS, SINGLE, ddp, ranks, statuses, write

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
GIB = 2**30
LONG = (*TINY[:-3], "train.steps=5", "train.epochs=100000", "train.validate=false", "train.global_batch=8")


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    with started() as slurm:
        yield slurm


def measured(results: Path) -> int:
    """Epochs of the only record, 0 where there is none."""
    return sum(record.get("summary", {}).get("epochs_done", 0) for record in records(results))


def test_scancel_leaves_a_killed_row_with_its_epochs_and_no_process(cluster: Slurm, tmp_path: Path) -> None:
    results = tmp_path / "results"
    options = ("-N2", "--ntasks-per-node=1", SCRIPTS / "run.sbatch")
    job = cluster.submit(tmp_path / "out.txt", *options, *LONG, f"results_dir={results}", DDLBENCH_PYTHON=PYTHON)
    wait_until(lambda: measured(results) >= 2)
    cluster.run("scancel", job)
    assert cluster.wait(job) == ["CANCELLED"]
    wait_until(lambda: not ranks(results))
    (attempt,) = attempts_of(results)
    assert attempt.record["status"] == "killed"
    assert "SIGTERM" in attempt.record["reason"]
    assert len(attempt.epochs) >= 2


def lose(cluster: Slurm, name: str) -> None:
    """The daemon of the node, that of its step and its ranks are killed, as by a loss of power."""
    daemon = cluster.daemons[-len(cluster.names) :][cluster.names.index(name)]
    node = host_name_space(daemon.pid)
    for process in psutil.process_iter():  # whatever has the host name of the node
        if host_name_space(process.pid) == node:
            process.kill()
    daemon.wait()


def host_name_space(process: int) -> Path | None:
    try:
        return Path(f"/proc/{process}/ns/uts").readlink()
    except OSError:  # it has ended
        return None


ON_CPUS = ("--slurm", "--sbatch=--gpus-per-node=0")
LOST = "rank 1 (node2, pid"  # begins the reason


def two_nodes(folder: Path, **more: object) -> Path:
    """A study of one cell: ddp on two nodes, 20 epochs of 40 steps. more: its keys, with _ for the dot"""
    keys = KEYS | {"train.epochs": 20, "train.steps": 40, "batch": 8}
    keys |= {name.replace("_", "."): value for name, value in more.items()}
    return write(folder, **ddp(2), keys=keys, gpus_per_node=1)


def test_a_lost_node_is_a_row_and_its_cell_runs_again_once_the_node_is_back(cluster: Slurm, tmp_path: Path) -> None:
    study, results = two_nodes(tmp_path), tmp_path / "results"
    sweep(cluster, study, results, *ON_CPUS)
    wait_until(lambda: measured(results) >= 1)
    lose(cluster, "node2")
    wait_until(lambda: LOST in str(records(results)[0]["reason"]))  # rank 0 first records what it saw, then the cause
    assert statuses(results) == {"ddp 2 error": 1}
    assert measured(results) >= 1
    wait_until(lambda: not ranks(results))
    shown = sweep(cluster, study, results, "--status")
    assert shown.stdout.startswith("1 cells: error\n"), shown.stderr
    assert LOST in shown.stdout
    assert sweep(cluster, study, results, *ON_CPUS, "--resume").stdout == "nothing to submit\n"
    cluster._start(*cluster._inside("node2"), "slurmd", "-D", "-N", "node2")
    wait_until(lambda: not cluster.run("squeue", "-h").stdout)
    assert sweep(cluster, study, results, *ON_CPUS, "--retry", "failed").stdout.count("job ") == 1
    wait_until(lambda: statuses(results)["ddp 2 ok"] == 1)
    assert statuses(results) == {"ddp 2 ok": 1, "ddp 2 error": 1}


@pytest.mark.parametrize("spare", [False, True])
def test_a_job_that_lost_a_node_waits_and_continues_from_its_checkpoint(tmp_path: Path, spare: bool) -> None:
    """On the same node once it is back, or on a spare one once the lost one is given up."""
    study, results = two_nodes(tmp_path, checkpoint_every=1), tmp_path / "results"
    with started(nodes=3 if spare else 2) as slurm:
        (job,) = numbers(sweep(slurm, study, results, "--slurm", "--sbatch=--gpus-per-node=0 --requeue"))
        wait_until(lambda: list(results.glob("*/checkpoints-1/epoch-*")))
        lose(slurm, "node2")
        wait_until(lambda: " Restarts=1 " in slurm.run("scontrol", "-o", "show", "job", job).stdout)
        assert sweep(slurm, study, results, "--status").stdout.startswith("1 cells: queued\n")
        assert sweep(slurm, study, results, *ON_CPUS, "--retry", "failed").stdout == "nothing to submit\n"
        if spare:
            slurm.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
        else:
            slurm._start(*slurm._inside("node2"), "slurmd", "-D", "-N", "node2")
        # Slurm waits for two minutes: until then a node that has come back refuses the job, "Job credential revoked".
        assert slurm.wait(job) == ["COMPLETED"], [path.read_text() for path in results.glob(".sweep/logs/*")]
    lost, whole = sorted(records(results), key=lambda record: record["attempt"])
    assert (lost["status"], whole["status"]) == ("error", "ok")
    assert LOST in lost["reason"]
    assert whole["launch"]["hosts"] == (["node1", "node3"] if spare else ["node1", "node2"])
    assert whole["resume"]["attempt"] == 1
    assert 1 <= whole["resume"]["epoch"] <= lost["summary"]["epochs_done"]
    assert (whole["summary"]["epochs_done"], whole["ledger"]["updates"]) == (20, 20 * 40)
    tables = make_tables(read_all([results]))
    counted = tables.epochs[tables.epochs["attempt"] == 2]
    assert counted["epoch"].tolist() == list(range(20))
    assert tables.scaling["runs_ok"].tolist() == [1]
    assert not ranks(results)


@pytest.mark.parametrize("requeue", [False, True])
def test_the_node_that_runs_the_job_script_is_lost(tmp_path: Path, requeue: bool) -> None:
    """With it rank 0 and srun: rank 1 writes the end. Slurm ends the job once the node is given up, or puts it back."""
    study, results = two_nodes(tmp_path, **{"checkpoint_every": 1} if requeue else {}), tmp_path / "results"
    with started(nodes=3) as slurm:
        options = "--sbatch=--gpus-per-node=0" + " --requeue" * requeue
        (job,) = numbers(sweep(slurm, study, results, "--slurm", options))
        wait_until(lambda: measured(results) >= 1 and (not requeue or list(results.glob("*/checkpoints-1/epoch-*"))))
        lose(slurm, "node1")
        wait_until(lambda: statuses(results) == {"ddp 2 error": 1})
        wait_until(lambda: not ranks(results))
        assert sweep(slurm, study, results, "--status").stdout.startswith("1 cells: error\n")
        assert sweep(slurm, study, results, *ON_CPUS, "--retry", "failed").stdout == "nothing to submit\n"
        slurm.run("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
        if requeue:
            assert slurm.wait(job) == ["COMPLETED"]
        else:
            assert slurm.wait(job) == ["NODE_FAIL"]
            assert sweep(slurm, study, results, *ON_CPUS, "--retry", "failed").stdout.count("job ") == 1
        wait_until(lambda: statuses(results) == {"ddp 2 error": 1, "ddp 2 ok": 1})
    lost, whole = sorted(records(results), key=lambda record: record["attempt"])
    assert (lost["launch"]["hosts"], whole["launch"]["hosts"]) == (["node1", "node2"], ["node2", "node3"])
    assert lost["reason"].startswith("rank 0, which held the rendezvous store, ended without a message")
    assert ("resume" in whole, whole["summary"]["epochs_done"]) == (requeue, 20)
    assert make_tables(read_all([results])).scaling["runs_ok"].tolist() == [1]


def test_a_controller_that_is_down_while_a_sweep_submits(cluster: Slurm, tmp_path: Path) -> None:
    study, results = write(tmp_path, **SINGLE, repeats=2), tmp_path / "results"
    controller = cluster.daemons[1]
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    assert "sbatch refused a job of 1 GPU (" in sweep(cluster, study, results, *ON_CPUS, code=2).stderr
    cluster._start("slurmctld", "-D")
    cluster.daemons.insert(1, cluster.daemons.pop())
    cluster._wait(lambda: cluster.run("squeue", "-h").returncode == 0)
    assert sweep(cluster, study, results, *ON_CPUS).stdout.count("job ") == 2
    assert sweep(cluster, study, results, *ON_CPUS).stdout == "nothing to submit\n"
    wait_until(lambda: statuses(results) == {"single 1 ok": 2})


FEW_CORES = ("preflight=true", "preflight_stop=null")  # which ranks get a core just then decides who looks slow


def test_thirty_two_ranks_on_eight_nodes_complete_a_run(tmp_path: Path) -> None:
    """All on this machine: what is tested is that so many ranks connect, agree, and are recorded."""
    if psutil.virtual_memory().available < 12 * GIB:
        pytest.skip("needs 12 GiB of free memory for 32 ranks")
    words = (*TINY[:-3], "train.steps=2", "train.epochs=2", "train.validate=false", "train.global_batch=64")
    command = (PYTHON, "-m", "ddlbench", *words, f"results_dir={tmp_path}/runs", *FEW_CORES)
    with started(nodes=8, cpus=4) as slurm:
        done = slurm.run("srun", "-N8", "-n32", "--ntasks-per-node=4", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    (attempt,) = attempts_of(tmp_path / "runs")
    content = attempt.record
    assert content["status"] == "ok"
    assert (content["launch"]["world_size"], content["launch"]["nodes"]) == (32, 8)
    assert content["launch"]["hosts"] == [f"node{number}" for number in range(1, 9)]
    assert content["ledger"]["samples"] == 2 * 2 * 64
    steps = pd.read_parquet(attempt.path / "steps.parquet")
    assert steps.groupby("rank").size().to_dict() == dict.fromkeys(range(32), 4)
