"""scripts/slurm/site: each file is sourced where no cluster is, with a stub of the module system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run

FOLDER = Path(__file__).parents[2] / "scripts" / "slurm" / "site"
SITES = sorted(path.stem for path in FOLDER.glob("*.sh"))
STUB = 'module() { echo "module $*" >&2; }; scontrol() { echo node7; echo node8; }; set -e; source "$1"; env'


def sourced(site: str, **env: Any) -> tuple[dict[str, str], str]:
    """The environment that a site's file leaves, and what it asked of the module system."""
    done = run("bash", "-c", STUB, "bash", FOLDER / f"{site}.sh", **env)
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), done.stderr


@pytest.mark.parametrize("site", SITES)
def test_a_site_file_works_on_a_login_node(site: str) -> None:
    """scaling.sh sources it there, where no variable of a job is set."""
    assert "MASTER_ADDR" not in sourced(site)[0]


@pytest.mark.parametrize("site", [site for site in SITES if site != "plain"])
def test_gloo_and_nccl_use_the_fast_network(site: str) -> None:
    """Without a name gloo takes the interface of the host name, which on these machines is the slow one."""
    env, _ = sourced(site, SLURM_JOB_NODELIST="node[7-8]")
    assert env["GLOO_SOCKET_IFNAME"] in ("ib0", "hsn0")
    assert env["NCCL_SOCKET_IFNAME"][:3] == env["GLOO_SOCKET_IFNAME"][:3]


def test_ranks_meet_on_infiniband_at_julich() -> None:
    env, asked = sourced("jsc", SLURM_JOB_NODELIST="node[7-8]")
    assert env["MASTER_ADDR"] == "node7i"
    assert sourced("jsc", SLURM_JOB_NODELIST="node[7-8]", DDLBENCH_JSC_SUFFIX="")[0]["MASTER_ADDR"] == "node7"
    assert "module load Stages/2025" in asked


def test_lumi_runs_an_image_where_one_is_given() -> None:
    env, _ = sourced("lumi", DDLBENCH_IMAGE="/some/image.sif")
    python = Path(env["DDLBENCH_PYTHON"])
    assert (python.is_file(), env["DDLBENCH_GPU"]) == (True, "rocm")
    assert "DDLBENCH_PYTHON" not in sourced("lumi")[0]
    masks = env["SLURM_CPU_BIND"].removeprefix("mask_cpu:").split(",")
    cores = [int(mask, 16) for mask in masks]
    assert len(cores) == 8
    assert sum(cores) == sum(0xFE << (8 * group) for group in range(8))  # seven cores of each group of eight, once
