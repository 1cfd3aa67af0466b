"""Real launchers for tests: started in a clean environment, ended with their ranks, installed where possible."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import WITHIN_S

PYTHON = sys.executable
MEET = Path(__file__).parent / "meet.py"
LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM", "OMPI_", "PMI", "MPI_", "TORCHELASTIC", "DDLBENCH_",
    "HOROVOD_",
)  # fmt: skip
MPI = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}  # command -> Debian package
AS_ROOT: dict[str, Any] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
}  # fmt: skip


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what an outer launcher left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"OMP_NUM_THREADS": "1"} | extra


def program(path: Path, text: str) -> Path:
    """A command that the test makes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(*command: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end. On a timeout the launcher is asked to end its ranks, which may have sessions of their own."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words, stdout=-1, stderr=-1, text=True, cwd=cwd, env=environment(**env), start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        out, err = end(process)
        pytest.fail(f"{' '.join(words)} took more than {WITHIN_S} s\n{out[-2000:]}\n{err[-2000:]}")
    except BaseException:
        end(process)
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        except ProcessLookupError:
            break
    return "", ""


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Generator[Path]:
    """A file system of `size` bytes of its own, in memory; skips the test where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    done = run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk) if os.getuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip() if done else 'not root'}")
    try:
        yield disk
    finally:
        run("umount", "-l", disk)


def met(result: subprocess.CompletedProcess[str]) -> list[dict]:
    """What the ranks of meet.py printed, in order of rank."""
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def need(packages: dict[str, str]) -> None:
    """Have the commands, each from its Debian package, or skip the test and say why."""
    missing = {command: package for command, package in packages.items() if not shutil.which(command)}
    if not missing:
        return
    names = " ".join(sorted(set(missing.values())))
    if os.getuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {names} (as root)")
    apt = "apt-get -q -o DPkg::Lock::Timeout=120"
    script = f"{apt} update && DEBIAN_FRONTEND=noninteractive {apt} install -y --no-install-recommends {names}"
    done = run("bash", "-c", script)
    if done.returncode:
        pytest.skip(f"apt-get install {names} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
