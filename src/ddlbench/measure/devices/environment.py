"""What can change the numbers: versions, hardware, variables, switches. An unreadable value is null, not an error."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch.cuda import nccl

import ddlbench
from ddlbench.cores import allowed_cores
from ddlbench.credentials import may_hold_credential
from ddlbench.ranks.launchers import SETTING_VARIABLES

T = TypeVar("T")

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
# NVML's levels of the nearest common ancestor of two GPUs, in the letters of `nvidia-smi topo -m`
TOPOLOGY = {0: "SAME", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def environment(device: torch.device) -> dict[str, Any]:
    """The `environment` section of run.json, as this rank sees it."""
    return {**machine(device), **source(Path(ddlbench.__file__).parent)}


def machine(device: torch.device) -> dict[str, Any]:
    """The environment without the commit: what ranks compare."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": or_none(lambda: ".".join(map(str, nccl.version()))),
        "packages": {
            name: version for name in PACKAGES if (version := or_none(lambda name=name: metadata.version(name)))
        },
        "hostname": platform.node(),
        "kernel": platform.release(),
        "cpu_model": or_none(lambda: proc_value("cpuinfo", "model name")),  # ARM machines may name none
        "cpu_count": len(allowed_cores()),
        "cpu_count_total": os.cpu_count(),
        "memory_total_bytes": or_none(lambda: psutil.virtual_memory().total),
        "torch_threads": torch.get_num_threads(),
        "switches": switches(),
        "variables": variables(os.environ),
        "gpu_count": or_none(torch.cuda.device_count),
        **gpu(device),
    }


def or_none(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None: an incomplete record is better than a run that fails while it collects facts."""
    try:
        return read()
    except Exception:
        return None


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


def switches() -> dict[str, Any]:
    """torch's global switches that change speed or numbers."""
    return {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_allow_tf32": or_none(lambda: torch.backends.cudnn.allow_tf32),
        "matmul_allow_tf32": or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        "float32_matmul_precision": or_none(torch.get_float32_matmul_precision),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def gpu(device: torch.device) -> dict[str, Any]:
    """The GPU of this rank, and how the GPUs of the node are connected; all null on a CPU."""
    cuda = device.type == "cuda"
    properties = or_none(lambda: torch.cuda.get_device_properties(device)) if cuda else None
    handle = or_none(lambda: nvml_handle(device)) if cuda else None
    facts: dict[str, Callable[[Any], Any]] = {
        "driver": lambda _: nvml().nvmlSystemGetDriverVersion(),
        "gpu_power_limit_w": lambda gpu: nvml().nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "gpu_power_limit_default_w": lambda gpu: nvml().nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
        "gpu_persistence": lambda gpu: bool(nvml().nvmlDeviceGetPersistenceMode(gpu)),
        "gpu_clock_mhz": lambda gpu: nvml().nvmlDeviceGetClockInfo(gpu, nvml().NVML_CLOCK_SM),
        "gpu_clock_max_mhz": lambda gpu: nvml().nvmlDeviceGetMaxClockInfo(gpu, nvml().NVML_CLOCK_SM),
        "gpu_memory_clock_mhz": lambda gpu: nvml().nvmlDeviceGetClockInfo(gpu, nvml().NVML_CLOCK_MEM),
        "gpu_memory_clock_max_mhz": lambda gpu: nvml().nvmlDeviceGetMaxClockInfo(gpu, nvml().NVML_CLOCK_MEM),
        "gpu_ecc": lambda gpu: bool(nvml().nvmlDeviceGetEccMode(gpu)[0]),
        "topology": lambda _: topology(),
    }
    return {
        "cudnn": or_none(torch.backends.cudnn.version) if cuda else None,
        "cuda_module_loading": or_none(module_loading) if properties else None,
        "gpu_model": properties.name if properties else None,
        "gpu_memory_total_bytes": properties.total_memory if properties else None,
        **{name: or_none(lambda read=read: read(handle)) if handle else None for name, read in facts.items()},
    }


def module_loading() -> str:
    """When the driver loads kernels: `lazy`, at their first use, or `eager`; CUDA_MODULE_LOADING chooses. The driver
    must be initialized."""
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int()
    if error := driver.cuModuleGetLoadingMode(ctypes.byref(mode)):
        raise OSError(error, "cuModuleGetLoadingMode")
    return {1: "eager", 2: "lazy"}[mode.value]  # CUmoduleLoadingMode of cuda.h


def nvml() -> Any:
    """NVIDIA's management library; raises where there is no driver."""
    import pynvml  # here: machines without an NVIDIA GPU never need it

    pynvml.nvmlInit()
    return pynvml


def nvml_handle(device: torch.device) -> Any:
    """NVML's handle of a torch device, by its PCI address: CUDA_VISIBLE_DEVICES renumbers torch's devices only."""
    place: Any = torch.cuda.get_device_properties(device)
    bus = f"{place.pci_domain_id:08x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
    return nvml().nvmlDeviceGetHandleByPciBusId(bus)


def topology() -> list[list[str]]:
    """How each two GPUs of the node are connected over PCIe, visible to this process or not: [gpu][gpu]."""
    library = nvml()
    gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    nearest = library.nvmlDeviceGetTopologyCommonAncestor
    return [["X" if a is b else TOPOLOGY[nearest(a, b)] for b in gpus] for a in gpus]
