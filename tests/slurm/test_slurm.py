"""The launcher and the scripts under a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddlbench.ranks.launchers import first_host
from tests.slurm.cluster import SCRIPTS, TINY, numbers, records, stub
from tests.support.libraries import needs_horovod
from tests.support.pictures import write_folders
from tests.support.processes import AS_ROOT, MEET, PYTHON, met, need, run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm

# A rank says who it is without torch, which takes seconds to import.
WHO = (
    "import json, os; from dataclasses import asdict; from ddlbench.ranks.launchers import detect, hint; me = detect();"
    "more = dict(hint=hint(me), gpu=os.environ.get('CUDA_VISIBLE_DEVICES'));"
    "print(json.dumps(asdict(me) | more) + '\\n', end='')"
)


def scripted(slurm, tmp_path: Path, *options: str, script: str, **env: str) -> list[dict]:
    """What the ranks of a batch script printed, in order of rank."""
    path = tmp_path / "script.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    output = tmp_path / "out.txt"
    job = slurm.submit(output, *options, path, PY=PYTHON, WHO=WHO, **env)
    assert slurm.wait(job) == ["COMPLETED"], output.read_text()
    lines = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_srun_ranks_connect_across_nodes(slurm):
    ranks = met(slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", PYTHON, MEET))
    assert [(rank["rank"], rank["local_rank"], rank["host"]) for rank in ranks] == [
        (0, 0, "node1"), (1, 1, "node1"), (2, 0, "node2"), (3, 1, "node2"),
    ]  # fmt: skip
    for rank in ranks:
        assert (rank["launcher"], rank["world_size"], rank["local_world_size"], rank["nodes"]) == ("srun", 4, 2, 2)
        assert (rank["master_addr"], rank["sum"]) == ("node1", 10)
    assert len({rank["master_port"] for rank in ranks}) == 1


def test_uneven_nodes_and_one_visible_gpu_a_task(slurm):
    ranks = met(slurm.run("srun", "-N2", "-n3", "--gpus-per-task=1", PYTHON, "-c", WHO))
    assert [(rank["local_rank"], rank["local_world_size"]) for rank in ranks] == [(0, 2), (1, 2), (0, 1)]
    assert [len(rank["gpu"].split(",")) for rank in ranks] == [1, 1, 1]
    assert ranks[0]["gpu"] != ranks[1]["gpu"]


def test_a_batch_script_without_srun_is_one_process_with_a_hint(slurm, tmp_path):
    (only,) = scripted(slurm, tmp_path, "-N2", "-n4", script='"$PY" -c "$WHO"')
    assert (only["launcher"], only["world_size"]) == ("alone", 1)
    assert only["hint"].startswith("one process in a Slurm job of 4 tasks")


def test_simultaneous_steps_on_different_nodes_form_separate_groups(slurm, tmp_path):
    step = 'srun --overlap -N1 -n2 -w node{} "$PY" -c "$WHO"'
    ranks = scripted(
        slurm, tmp_path, "-N2", "-n4", "--ntasks-per-node=2", script=f"{step.format(1)} & {step.format(2)}; wait"
    )
    assert [rank["rank"] for rank in ranks] == [0, 0, 1, 1]
    assert {rank["master_addr"] for rank in ranks} == {"node1", "node2"}
    assert len({rank["master_port"] for rank in ranks}) == 2


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mpirun", "package", "option"),
    [
        ("mpirun.openmpi", "openmpi-bin", "-x MASTER_ADDR=node1"),
        ("mpirun.mpich", "mpich", "-genv MASTER_ADDR node1 -genv MASTER_PORT 29500"),
    ],
)
def test_mpirun_inside_a_job(slurm, tmp_path, mpirun, package, option):
    """Its daemons are tasks of srun: their step's variables count daemons, not ranks."""
    need({mpirun: package})
    options = ("-N2", "-n4", "--ntasks-per-node=2")
    ranks = scripted(slurm, tmp_path, *options, script=f'{mpirun} {option} "$PY" -c "$WHO"', **AS_ROOT)
    assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {(rank["launcher"], rank["nodes"], rank["master_addr"]) for rank in ranks} == {("mpirun", 2, "node1")}
    assert len({rank["master_port"] for rank in ranks}) == 1


@pytest.mark.parametrize("hosts", ["node[1-2]", "rack[2-3]n[07-09,12],login1", "n[007-011,3],m1", "a,b[2-3]"])
def test_first_host_is_scontrols(slurm, hosts):
    assert first_host(hosts) == slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()[0]


@pytest.mark.slow
@needs_horovod
def test_srun_runs_horovod_into_one_record(slurm, tmp_path):
    command = (PYTHON, "-m", "ddlbench", "+framework=horovod", *TINY[1:], "train.global_batch=8")
    done = slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", *command, f"results_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path)
    assert (record["status"], record["reason"]) == ("ok", None)
    launch = record["launch"]
    assert (launch["launcher"], launch["world_size"], launch["nodes"]) == ("srun", 4, 2)
    assert sorted(launch["hosts"]) == ["node1", "node2"]


@pytest.mark.slow
def test_each_node_stages_a_copy_of_its_own(slurm, tmp_path):
    write_folders(tmp_path / "images", train=4, val=3)
    data = ("data=imagenet", f"data.root={tmp_path}/images", f"data.stage_to='{tmp_path}/$SLURMD_NODENAME'")
    command = (PYTHON, "-m", "ddlbench", *TINY[:5], "mode=loader", "train.global_batch=4", "loader.workers=0", *data)
    done = slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", *command, f"results_dir={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path / "runs")
    assert (record["status"], record["summary"]["val_samples"]) == ("ok", 9)
    staged = record["staging"]
    assert (staged["nodes"], staged["files"], staged["copied_bytes"]) == (2, 21, 2 * staged["bytes"])
    for node in ("node1", "node2"):
        assert len(list((tmp_path / node).rglob("*.JPEG"))) == 21


def test_run_sbatch_runs_in_the_users_folder_with_what_the_file_of_the_site_sets(slurm, tmp_path):
    output, site = tmp_path / "out.txt", tmp_path / "site.sh"
    python = stub(tmp_path, 'echo "$PWD: $*"')
    site.write_text('export DDLBENCH_PYTHON="$MY_PYTHON"\n')
    words = (f"--chdir={tmp_path}", SCRIPTS / "run.sbatch", "+model=vgg16", "results_dir=mine")
    job = slurm.submit(output, *words, DDLBENCH_SITE=str(site), MY_PYTHON=str(python))
    assert slurm.wait(job) == ["COMPLETED"], output.read_text()
    said = [line for line in output.read_text().splitlines() if not line.startswith(("run.sbatch: ", "srun: "))]
    assert said == [f"{tmp_path}: -m ddlbench cluster=slurm +model=vgg16 results_dir=mine"]


def test_run_sbatch_unpacks_an_environment_on_each_node(slurm, tmp_path):
    """In it a ddlbench that says where it is. (The nodes are one machine: they share the folder.)"""
    run(PYTHON, "-m", "venv", "--without-pip", tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "ddlbench").mkdir()
    (packages / "ddlbench" / "__main__.py").write_text("import sys; print('ran in', sys.prefix)\n")
    run("tar", "-C", tmp_path / "venv", "-cf", tmp_path / "venv.tar", ".")
    output, local = tmp_path / "out.txt", tmp_path / "local disk"
    local.mkdir()
    env = {"DDLBENCH_STAGE": str(tmp_path / "venv.tar"), "DDLBENCH_STAGE_TO": str(local), "PYTHONPATH": ""}
    job = slurm.submit(output, "-N2", "--ntasks-per-node=2", SCRIPTS / "run.sbatch", "+model=resnet50", **env)
    assert slurm.wait(job) == ["COMPLETED"], output.read_text()
    lines = output.read_text().splitlines()
    # On a busy machine the step before may not have ended yet: srun says on its error stream that it waits.
    before, *ranks, after = (line for line in lines if not line.startswith("srun: "))
    assert before.endswith(" 2 nodes: +model=resnet50")
    assert ranks == [f"ran in {local}/ddlbench-{job}"] * 4
    assert after == "run.sbatch: exit code 0"
    assert list(local.iterdir()) == []


def test_a_run_without_a_record_has_the_status_of_the_rank_that_failed_first(slurm, tmp_path):
    """Rank 1 exits with 4. srun then terminates rank 0 and exits with 143, the larger code.

    A Python process needs a moment to end after its last line. Slurm can lose a line of a task that exits at once."""
    output, results = tmp_path / "out.txt", tmp_path / "runs"
    python = stub(
        tmp_path,
        f"""case "$*:$SLURM_PROCID" in
  *sweep.end_without_record*) exec {PYTHON} "$@" ;;
  *:1) echo "ddlbench: unavailable: no library y" && sleep 1 && exit 4 ;;
  *) sleep 300 ;;
esac""",
    )
    options = ("-N2", "--ntasks-per-node=1", SCRIPTS / "run.sbatch")
    words = (*TINY, "train.global_batch=8", f"results_dir={results}")
    job = slurm.submit(output, *options, *words, DDLBENCH_PYTHON=str(python))
    assert slurm.wait(job) == ["FAILED"], output.read_text()
    (record,) = records(results)
    ended = "the run ended before it had a record: exit codes 4, 143"
    assert (record["status"], record["reason"]) == ("unavailable", f"no library y; {ended}"), output.read_text()
    assert (record["launch"]["nodes"], record["config"]["cluster"]["name"]) == (2, "ddlbench")
    assert record["environment"]["variables"]["SLURM_JOB_ID"] == job


@pytest.mark.slow
def test_a_requeued_job_continues_its_run(slurm, tmp_path):
    output = tmp_path / "out.txt"
    words = (*TINY[:-2], "train.epochs=30", "train.steps=5", "train.global_batch=8", "checkpoint.every=1")
    options = ("--requeue", "--ntasks=2", f"--chdir={tmp_path}", SCRIPTS / "run.sbatch")
    env = {"DDLBENCH_PYTHON": PYTHON, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    job = slurm.submit(output, *options, *words, **env)
    wait_until(lambda: list(tmp_path.glob("results/*/checkpoints-1/epoch-000003")))
    slurm.requeue(job)
    assert slurm.wait(job) == ["COMPLETED"], output.read_text()
    first, second = records(tmp_path / "results")
    assert first["status"] != "ok"
    assert second["status"] == "ok"
    assert second["resume"]["attempt"] == 1
    assert second["resume"]["epoch"] >= 3
    assert second["summary"]["epochs_done"] == 30
    assert not list(tmp_path.glob("results/*/checkpoints-*"))


@pytest.mark.slow
def test_a_requeued_job_does_not_repeat_the_runs_that_ended_well(slurm, tmp_path):
    """The first of three runs ends well, the second fails, in the third the job is put into the queue again."""
    waits = 'case "$*" in *=two*) exit 3;; *=three*) [ -n "$SLURM_RESTART_COUNT" ] || sleep 300;; esac'
    python, output = stub(tmp_path, waits), tmp_path / "out.txt"
    words = ("name=one", "--next", "name=two", "--next", "name=three")
    job = slurm.submit(output, "--requeue", SCRIPTS / "run.sbatch", *words, DDLBENCH_PYTHON=str(python))
    wait_until(lambda: output.exists() and "nodes: name=three" in output.read_text())
    slurm.requeue(job)
    assert slurm.wait(job) == ["FAILED"], output.read_text()
    said = output.read_text()
    assert [said.count(f" nodes: name={name}\n") for name in ("one", "two", "three")] == [1, 2, 2], said
    assert "run.sbatch: ended well before the job was put into the queue again: name=one\n" in said


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ("-N2 --ntasks-per-node=2 --exclusive", 4),  # of 8 cores a node
        ("-N2 --ntasks-per-node=3 --exclusive", 2),
        ("-N2 -n3 --exclusive", 4),  # two tasks on one node, one on the other
        ("-N2 --ntasks-per-node=2", 1),  # no more was asked for
        ("-N2 --ntasks-per-node=2 --cpus-per-task=3", 3),
        ("-N2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-gpu=3", 3),
    ],
)
def test_run_sbatch_gives_each_task_its_share_of_the_cores(slurm, tmp_path, options, cores):
    python, output = stub(tmp_path, 'echo "task $SLURM_PROCID: $SLURM_CPUS_PER_TASK"'), tmp_path / "out.txt"
    script = (SCRIPTS / "run.sbatch", "+model=resnet50")
    job = slurm.submit(output, *options.split(), *script, DDLBENCH_PYTHON=str(python))
    assert slurm.wait(job) == ["COMPLETED"], output.read_text()
    printed = sorted(line for line in output.read_text().splitlines() if line.startswith("task "))
    assert printed == [f"task {task}: {cores}" for task in range(len(printed))]
    assert len(printed) == {"-n3": 3, "--ntasks-per-node=3": 6}.get(options.split()[1], 4)


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ({"SLURM_JOB_ID": "1"}, ["+model=resnet50"], "no nowhere/python here: set DDLBENCH_PYTHON"),
        ({"SLURM_JOB_ID": "1", "DDLBENCH_SITE": "moon"}, ["+model=resnet50"], "DDLBENCH_SITE=moon: there is no file"),
        ({"SLURM_JOB_ID": "1"}, [], "nothing to run: sbatch [options]"),
        ({}, ["+model=resnet50"], "not in a Slurm job: submit it, sbatch [options]"),
    ],
)
def test_run_sbatch_refuses_in_one_line(env, args, message):
    here = {"DDLBENCH_PYTHON": "nowhere/python", "SLURM_SUBMIT_DIR": "/"}
    refused = run("bash", SCRIPTS / "run.sbatch", *args, **(here | env))
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert message in line


def test_the_jobs_of_a_scaling_study_run_one_after_the_other(slurm, tmp_path):
    """Two GPUs are one a node here."""
    options = ("--gpus", "1 2", "--gpus-per-node", "1", "--scaling", "weak", "--batch", "4", "--no-check")
    more = ("--sbatch", f"--output={tmp_path}/%x.txt", "--", *TINY, f"results_dir={tmp_path}/runs")
    done = slurm.run(SCRIPTS / "scaling.sh", *options, *more, DDLBENCH_PYTHON=PYTHON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"ddlbench.report {tmp_path}/runs --out {tmp_path}/runs/report")
    states = slurm.wait(*numbers(done))
    assert states == ["COMPLETED", "COMPLETED"], "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    result = sorted(records(tmp_path / "runs"), key=lambda record: record["launch"]["world_size"])
    assert [record["status"] for record in result] == ["ok", "ok"]
    assert [record["launch"]["launcher"] for record in result] == ["srun", "srun"]
    assert [record["launch"]["nodes"] for record in result] == [1, 2]
    assert {record["config"]["cluster"]["name"] for record in result} == {"ddlbench"}  # the test cluster's own name
    assert sorted(result[1]["launch"]["hosts"]) == ["node1", "node2"]
    assert [record["ledger"]["global_batch"] for record in result] == [4, 8]
    starts, ends = ([record["times"][name] for record in result] for name in ("start", "end"))
    assert min(ends) <= max(starts), "one job waits for the other"


@pytest.mark.slow
def test_the_part_about_faults_of_first_gpu_is_submitted_and_passes(slurm, tmp_path):
    """Over gloo and shrunk."""
    small = {"DDLBENCH_TINY": "1", "GPUS": "1", "CPUS": "1", "HANG_S": "20"}
    output = tmp_path / "out.txt"
    done = slurm.run(
        "scripts/first_gpu.sh", "two-nodes", "faults", tmp_path / "results", cwd=SCRIPTS.parents[1], PYTHON=PYTHON,
        WHEELS="nowhere", SBATCH_OPTIONS=f"--output={output}", **small,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (state,) = slurm.wait(done.stdout.split()[-1])
    said = output.read_text()
    assert state == "COMPLETED", said
    assert "| faults/rank-dies | passed: " in said
    assert "| faults/rank-hangs | passed: timeout |" in said
