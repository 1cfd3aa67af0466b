"""What the record says of the machine; see measure/devices/environment.py."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess

import pytest
import torch

from ddlbench.credentials import LEFT_OUT
from ddlbench.measure.devices.environment import PREFIXES, SECRETS, environment, source, variables
from ddlbench.measure.devices.memory import peaks
from tests.support.runs import SMALL, record

CPU = torch.device("cpu")
GPU_FACTS = (
    "cudnn", "driver", "gpu_model", "gpu_memory_total_bytes", "gpu_power_limit_w", "gpu_clock_mhz", "gpu_clock_max_mhz",
    "gpu_ecc", "topology", "gpu_power_limit_default_w", "gpu_persistence", "gpu_memory_clock_mhz",
    "gpu_memory_clock_max_mhz", "cuda_module_loading",
)  # fmt: skip


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Run git in a fresh repository in tmp_path, away from the user's own settings."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def run(*words):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "-q")
    return run


def make_package(folder):
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def test_facts_of_this_machine():
    facts = environment(CPU)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert None not in facts["packages"].values()
    assert facts["hostname"] == platform.node()
    assert facts["torch_threads"] == torch.get_num_threads()
    assert 1 <= facts["cpu_count"] <= facts["cpu_count_total"]
    assert facts["memory_total_bytes"] > 2**29
    assert json.loads(json.dumps(facts)) == facts


def test_the_cpu_count_is_what_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        facts = environment(CPU)
    finally:
        os.sched_setaffinity(0, allowed)
    assert facts["cpu_count"] == 1
    assert facts["cpu_count_total"] == os.cpu_count()


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 99)])
def test_what_cannot_be_read_is_null(device):
    facts = environment(device)
    assert [facts[name] for name in GPU_FACTS if name != "cudnn"] == [None] * (len(GPU_FACTS) - 1)


SEEN = {
    "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "UCX_TLS": "rc", "PYTORCH_ALLOC_CONF": "a:b",
    "PYTORCH_CUDA_ALLOC_CONF": "a", "NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FI_PROVIDER": "x", "TORCHINDUCTOR_CACHE_DIR": "/x", "TRITON_CACHE_DIR": "/x", "DS_BUILD_OPS": "0",
    "OMPI_MCA_btl": "tcp", "CUDA_MODULE_LOADING": "LAZY", "DDLBENCH_HOME": "/scratch",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:4000", "MIOPEN_FIND_MODE": "3", "HSA_ENABLE_SDMA": "0",
}  # fmt: skip
PLANTED = "planted-Xy7"
HIDDEN = {
    "HOME": "/home/me", "MY_NCCL_DEBUG": "x", "AWS_SECRET": "x", "NVIDIA_API": "x",
    **{f"SLURM_{word}_1": PLANTED for word in SECRETS},
    **{f"{prefix}x_{word.lower()}": PLANTED for prefix in PREFIXES for word in SECRETS},
    "SLURM_PROXY": f"http://me:{PLANTED}@proxy:8080", "UCX_URL": f"prefix https://{PLANTED}@host/path",
    "SLURM_EXPORT_ENV": f"ALL,HF_TOKEN={PLANTED}", "NCCL_NET": f"{'x' * 990} password={PLANTED}",
}  # fmt: skip


def test_variables_are_allow_listed_and_never_secrets():
    assert {"PASS", "PWD", "COOKIE", "SESSION", "SECRET", "TOKEN", "KEY", "LICENSE", "COMMENT"} <= set(SECRETS)
    assert variables(SEEN | HIDDEN) == SEEN
    assert variables({"NCCL_TOPO": "x" * 5000}) == {"NCCL_TOPO": "x" * 1000}


def test_a_planted_secret_never_reaches_the_record(ddlbench, monkeypatch, tmp_path):
    for name, value in (SEEN | HIDDEN).items():
        if not name.startswith(("SLURM_", "OMPI_")) or PLANTED in value:  # these would name a launcher
            monkeypatch.setenv(name, value)
    notes = f"cluster.notes='user: me, password: {PLANTED}'"
    code, said = ddlbench(*SMALL, "train.epochs=1", "train.validate=false", notes)
    assert code == 0, said
    content = record(tmp_path)
    assert content["config"]["cluster"]["notes"] == LEFT_OUT
    result = content["environment"]
    assert result["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert result["cpu_count_min"] == result["cpu_count"]
    files = [file for file in tmp_path.glob("results/**/*") if file.is_file()]
    assert len(files) >= 3
    assert not [file for file in files if PLANTED.encode() in file.read_bytes()]


def test_commit_and_changes_of_a_checkout(git, tmp_path, monkeypatch):
    package = make_package(tmp_path / "src" / "ddlbench")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a hook of another repository
    clean = {"git_commit": git("--git-dir", str(tmp_path / ".git"), "rev-parse", "HEAD"), "git_dirty": False}
    (tmp_path / "notes.txt").write_text("not part of a run")
    assert source(package) == clean
    (package / "new.py").write_text("")
    assert source(package) == clean | {"git_dirty": True}
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("changed = True\n")
    assert source(package) == clean | {"git_dirty": True}


@pytest.mark.parametrize(
    "folder",
    [".venv/lib/python3/site-packages/ddlbench", "vendor/ddlbench", "vendor/ddlbench-0.1/src/ddlbench"],
    ids=["wheel", "target", "sdist"],
)
def test_a_copy_inside_another_repository_has_no_commit(git, tmp_path, folder):
    package = make_package(tmp_path / folder)
    git("add", "-f", ".")
    git("commit", "-q", "-m", "theirs")
    assert source(package) == {"git_commit": None, "git_dirty": None}


def test_sources_without_a_repository_or_git_have_no_commit(tmp_path, monkeypatch):
    package = make_package(tmp_path / "src" / "ddlbench")
    assert source(package) == {"git_commit": None, "git_dirty": None}
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source(package) == {"git_commit": None, "git_dirty": None}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_facts_of_a_gpu():
    device = torch.device("cuda", 0)
    block = torch.zeros(2**28, dtype=torch.uint8, device=device)
    facts = environment(device)
    assert facts["gpu_model"] == torch.cuda.get_device_name(device)
    assert facts["gpu_clock_mhz"] <= facts["gpu_clock_max_mhz"]
    assert facts["gpu_power_limit_w"] > 10
    assert [row[i] for i, row in enumerate(facts["topology"])] == ["X"] * len(facts["topology"])
    assert {name for name in GPU_FACTS if facts[name] is None} <= {"gpu_ecc"}
    used = peaks(device)["memory_device_peak_bytes"]
    assert used is not None
    assert block.nbytes < used <= facts["gpu_memory_total_bytes"] * 1.1
