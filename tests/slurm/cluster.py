"""A private Slurm of a few "nodes" on this one machine, for root on Debian. To try things by hand:

    python -m tests.slurm.cluster    # prints what to export; Ctrl-C ends it

All daemons run in the foreground as children of this process and end with it. Each node has host name and /etc/hosts of
its own (namespaces), so the machine itself stays as it is. GPUs are fake device files: Slurm counts them, nobody uses
them. CPU binding and memory limits are not enforced.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import environment, need, program, run
from tests.support.waiting import WITHIN_S, wait_until

COMMANDS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
NULL = os.makedev(1, 3)
SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
TINY = (
    "+framework=ddp", "+model=resnet50", "model.layers=[1,1,1,1]", "model.width_per_group=8", "model.image_size=32",
    "loader=synthetic", "train.steps=2", "train.epochs=1", "train.validate=false",
)  # fmt: skip

CONF = """
ClusterName=ddlbench
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={root}/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
MailProg=/bin/true
ReturnToService=2
KillWait=5
GresTypes=gpu
PartitionName=debug Nodes=ALL Default=YES State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} "
    "CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{gpus}\n"
)


class Slurm:
    """Nodes node1, node2, ... with `cpus` and fake `gpus` each; a context manager."""

    def __init__(self, nodes: int = 2, cpus: int = 8, gpus: int = 4) -> None:
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.cpus, self.gpus = cpus, gpus
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *command: object, **env: Any) -> subprocess.CompletedProcess[str]:
        variables: dict[str, Any] = env | self.env
        return run(*command, **variables)

    def submit(self, output: Path, *words: object, **env: Any) -> str:
        """Submit a job that prints to `output`; its number. words: options of sbatch, the script and its arguments"""
        done = self.run("sbatch", "--parsable", f"--output={output}", *words, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait(self, *jobs: str) -> list[str]:
        """The state of each job once it ended: COMPLETED, FAILED, ... (`sbatch --wait` looks after 2, 12, 42 s.)"""
        deadline = time.monotonic() + WITHIN_S
        while True:
            shown = [self.run("scontrol", "-o", "show", "job", job).stdout for job in jobs]
            found = [re.search(r" JobState=(\S+)", text) for text in shown]
            states = [state[1] if state else "unknown" for state in found]  # a busy controller may not answer in time
            if not {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "unknown"} & set(states):
                return states
            assert time.monotonic() < deadline, f"jobs {jobs} are {states} after {WITHIN_S} s"
            time.sleep(0.3)

    def requeue(self, job: str) -> None:
        """Put a job into the queue again, and let it start after two seconds instead of Slurm's two minutes. In the
        second in which its first start ended, slurmd would refuse it (slurm_cred_revoked in Slurm's source compares
        whole seconds), and the job would end as FAILED without a line of output."""
        self.run("scontrol", "requeue", job)
        wait_until(lambda: " JobState=PENDING" in self.run("scontrol", "-o", "show", "job", job).stdout)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            self._start("munged", "-F", "--force", *self._munge_files())
            self._wait(lambda: (self.root / "munge.sock").exists())
            self._start("slurmctld", "-D")
            for name in self.names:
                self._start(*self._inside(name), "slurmd", "-D", "-N", name)
            self._wait(lambda: self.run("sinfo", "-hNo", "%T").stdout.split() == ["idle"] * len(self.names))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs, then the daemons, the last started first."""
        if len(self.daemons) > 1:
            self.run("scancel", "--user", "root")
            self._wait(lambda: not self.run("squeue", "-h").stdout, fatal=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.root)

    def _configure(self) -> None:
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        (self.root / "munge.key").touch(mode=0o600)
        (self.root / "munge.key").write_bytes(os.urandom(128))
        for number in range(self.gpus):
            os.mknod(self.root / f"gpu{number}", stat.S_IFCHR | 0o666, NULL)
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{self.gpus - 1}]\n")
        port, *ports = free_ports(1 + len(self.names))
        addresses = [f"127.0.0.{10 + number}" for number, _ in enumerate(self.names)]
        hosts = "".join(f"{address} {name}\n" for address, name in zip(addresses, self.names, strict=True))
        (self.root / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        nodes = [
            NODE.format(name=name, address=address, port=own, cpus=self.cpus, gpus=self.gpus)
            for name, address, own in zip(self.names, addresses, ports, strict=True)
        ]
        # The ranks' port follows from the job's number, and another test's Slurm may run on this machine, too.
        conf = CONF.format(root=self.root, port=port, first=random.randrange(1, 60_000))
        (self.root / "slurm.conf").write_text(conf + "".join(nodes))

    def _munge_files(self) -> list[str]:
        files = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={self.root}/munge.{suffix}" for option, suffix in files.items()]

    def _inside(self, name: str) -> list[str]:
        """Namespaces in which this machine is called `name` and knows the other nodes."""
        script = f'mount --bind {self.root}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return ["unshare", "--uts", "--mount", "sh", "-c", script, name]

    def _start(self, *command: str) -> None:
        log = (self.root / f"{command[0]}.out").open("ab")
        with log:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(**self.env), start_new_session=True,
            )  # fmt: skip
        self.daemons.append(daemon)

    def _wait(self, ready, fatal: bool = True) -> None:
        deadline = time.monotonic() + (WITHIN_S if fatal else 30)
        while not ready():
            if time.monotonic() > deadline:
                assert not fatal, f"Slurm does not come up:\n{self.logs()}"
                return
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted([*self.root.glob("*.log"), *self.root.glob("*.out")])
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def obstacle() -> str | None:
    """Why no Slurm can be started here."""
    if os.getuid() != 0:
        return "a test Slurm needs root"
    tried = subprocess.run(["unshare", "--uts", "--mount", "hostname", "node1"], capture_output=True, text=True)
    return f"a test Slurm needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def started(**sizes: int) -> Generator[Slurm]:
    """A Slurm of its own for a test, which is skipped where none can be started."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    need(COMMANDS)
    with Slurm(**sizes) as slurm:
        yield slurm


def sweep(slurm: Slurm, study: Path, results: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """ddlbench-sweep, which ends with this exit code."""
    command = (sys.executable, "-m", "ddlbench.sweep", study, f"results_dir={results}", *options)
    done = slurm.run(*command, DDLBENCH_PYTHON=sys.executable)
    assert done.returncode == code, done.stderr
    return done


def stub(folder: Path, text: str) -> Path:
    """A shell script that stands for python."""
    return program(folder / "python", f"#!/bin/sh\n{text}\n")


def numbers(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Of the jobs that a sweep or scaling.sh has submitted."""
    return re.findall(r"^job (\d+):", done.stdout, re.MULTILINE)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/attempt-*/run.json"))]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Slurm() as slurm, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={slurm.root}/slurm.conf", flush=True)
        signal.pause()
