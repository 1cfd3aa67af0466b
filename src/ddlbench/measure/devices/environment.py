"""What can change the numbers: versions, hardware, variables, switches. An unreadable value is null, not an error."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.cuda import nccl

import ddlbench
from ddlbench.cores import allowed_cores, machine_cores
from ddlbench.credentials import may_hold_credential
from ddlbench.measure.devices.nvml import gpu
from ddlbench.measure.devices.unknown import or_none
from ddlbench.ranks.launchers import SETTING_VARIABLES

PACKAGES = (
    "ddlbench", "torch", "torchvision", "triton", "transformers", "tokenizers", "timm", "hydra-core", "omegaconf",
    "numpy", "pandas", "pyarrow", "pillow", "pillow-simd", "bitsandbytes", "deepspeed", "horovod",
    "megatron-core", "mpi4py", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-ml-py", "transformer-engine",
)  # fmt: skip
# Prefixes of the variables that libraries, networks and schedulers read: no others are recorded, and of these none that
# may hold a credential or something private. README.md documents this: change it there too.
PREFIXES = (
    *SETTING_VARIABLES,
    "CUBLAS_", "CUDA_", "CUDNN_", "DDLBENCH_", "DS_", "FI_", "GLOO_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_",
    "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "PYTORCH_", "TCMALLOC_", "TORCHINDUCTOR_", "TORCH_", "TRITON_", "UCX_",
    "HIP_", "HSA_", "MIOPEN_", "RCCL_", "ROCR_",  # of AMD GPUs
)  # fmt: skip
SECRETS = (
    "AUTH", "COMMENT", "COOKIE", "CREDENTIAL", "JWT", "KEY", "LICENSE", "PASS", "PWD", "SECRET", "SESSION", "TOKEN",
)  # fmt: skip
LONGEST_VALUE = 1000  # characters


def environment(device: torch.device) -> dict[str, Any]:
    """The `environment` section of run.json, as this rank sees it."""
    return {**machine(device), **source(Path(ddlbench.__file__).parent)}


def machine(device: torch.device) -> dict[str, Any]:
    """The environment without the commit: what ranks compare. switches: torch's, which change speed or numbers"""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": or_none(lambda: ".".join(map(str, nccl.version()))),
        "packages": {
            name: version for name in PACKAGES if (version := or_none(lambda name=name: metadata.version(name)))
        },
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "cpu_model": or_none(lambda: proc_value("cpuinfo", "model name")),  # ARM machines may name none
        "cpu_count": len(allowed_cores()),
        "cpu_count_total": machine_cores(),
        "memory_total_bytes": or_none(lambda: psutil.virtual_memory().total),
        "torch_threads": torch.get_num_threads(),
        "switches": {
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_allow_tf32": or_none(lambda: torch.backends.cudnn.allow_tf32),
            "matmul_allow_tf32": or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
            "float32_matmul_precision": or_none(torch.get_float32_matmul_precision),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "variables": variables(os.environ),
        "gpu_count": or_none(torch.cuda.device_count),
        **gpu(device),
    }


def source(package: Path) -> dict[str, Any]:
    """Commit of the git checkout that holds `package`, and whether its code or configuration differ from that commit.

    Null for an installed package, even inside another repository.
    """
    root = package.parents[1]
    checkout = package == root / "src" / package.name and (root / ".git").exists()
    # What a run executes, new files included.
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--", "src", "conf"]
    # Variables such as GIT_DIR, set while a hook runs, would point to another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"  # reading must not block a commit in the same checkout
    options: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": 5, "check": True}
    output = or_none(lambda: subprocess.run(command, **options).stdout) if checkout else None
    if output is None:
        return {"git_commit": None, "git_dirty": None}
    lines: list[str] = output.splitlines()
    commit = next(line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid "))
    return {"git_commit": commit, "git_dirty": any(not line.startswith("#") for line in lines)}


def proc_value(file: str, name: str) -> str:
    """What a file of /proc has after "name:". OSError, StopIteration where there is none."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)


def variables(names: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries and schedulers read, without anything like a credential."""
    return {
        name: value[:LONGEST_VALUE]
        for name, value in sorted(names.items())
        if name.startswith(PREFIXES)
        and not any(word in name.upper() for word in SECRETS)
        and not may_hold_credential(value)
    }
