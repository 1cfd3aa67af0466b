"""scripts/nccl_home.py: the folder that Horovod's build takes as NCCL, from wheels made by hand and torch's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run

SCRIPT = Path(__file__).parents[2] / "scripts" / "nccl_home.py"


def make(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where `site` is the only folder of installed packages."""
    program = f"""
import runpy, sys
sys.path.append({str(site)!r})
sys.argv = ["nccl_home", {str(folder)!r}]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    return run(sys.executable, "-I", "-S", "-c", program)


@pytest.mark.parametrize("nccl", ["nvidia/nccl", "nvidia/cu13"])
def test_the_wheels_library_and_headers_are_linked(tmp_path: Path, nccl: str) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    for name in (f"{nccl}/lib/libnccl.so.2", f"{nccl}/include/nccl.h"):
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(name)
    info = site / "nvidia_nccl_cu13-2.30.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.30.7\n")
    (info / "RECORD").write_text(f"{nccl}/include/nccl.h,,\n{nccl}/lib/libnccl.so.2,,\n")
    for _ in range(2):  # again over what is there
        done = make(home, site)
        assert done.returncode == 0, done.stderr
    assert (home / "lib" / "libnccl.so").read_text() == f"{nccl}/lib/libnccl.so.2"
    assert (home / "include" / "nccl.h").read_text() == f"{nccl}/include/nccl.h"


def test_without_the_wheel_it_says_what_to_set(tmp_path: Path) -> None:
    done = make(tmp_path / "home", tmp_path)
    assert done.returncode == 1
    assert "set HOROVOD_NCCL_HOME" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_torchs_own_nccl_is_found(tmp_path: Path) -> None:
    done = run(sys.executable, SCRIPT, tmp_path)
    if done.returncode:
        pytest.skip(f"this torch has no NCCL wheel: {done.stderr.strip()}")
    assert (tmp_path / "lib" / "libnccl.so").is_file()
    assert "ncclCommInitRank" in (tmp_path / "include" / "nccl.h").read_text()
