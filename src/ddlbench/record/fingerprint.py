"""The part of a record's `environment` that repeats must share: versions, driver, switches, variables, kind of host.

The run compares its ranks by this part, and the report decides by it which attempts are repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlbench.foreign import section
from ddlbench.ranks.launchers import PLACE_VARIABLES

# Versions beside those of the packages.
VERSIONS = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
# The kind of host and its settings.
HOST = (
    "cpu_model", "cpu_count_total", "gpu_model", "gpu_power_limit_w", "gpu_clock_max_mhz", "gpu_ecc", "topology",
)  # fmt: skip
# These also differ with the number of ranks on a host: they separate repeats, but not the points of a curve.
# Slurm and containers show a process the GPUs of its job alone, so their links, too.
OF_THE_LAUNCH = ("cpu_count", "topology", "variables")
# A warning names these where repeats that are merged differ in them.
NOTED = ("kernel", "git_commit", "git_dirty", "gpu_persistence", "gpu_memory_clock_max_mhz", "cuda_module_loading")
# Packages that read the configuration or write the record: they cannot change a measurement.
NOTED_PACKAGES = ("ddlbench", "hydra-core", "omegaconf", "pandas", "pyarrow", "nvidia-ml-py")

# Variables that say which process this is, or where files lie, but not how it computes.
IDENTITY = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "DDLBENCH_", *PLACE_VARIABLES,
)  # fmt: skip
SETTINGS = ("OMPI_MCA_btl", "OMPI_MCA_coll", "OMPI_MCA_mtl", "OMPI_MCA_pml")  # settings with such a name
PLACES = (
    "_DIRECTORY", "_DUMP_DIR", "_DUMP_FILE", "_TEMP_FILE", "_LOG_FILE", "_CACHE_DIR", "_CACHE_PATH", "_HOME",
    "_DEBUG_FILE", "_EXTENSIONS_DIR", "_DB_PATH", "CUDA_PATH", "HIP_PATH",
)  # fmt: skip


def fingerprint(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The values that repeats must share, by dotted keys; unknown ones are left out. environment: that of run.json"""
    packages = {k: v for k, v in section(environment, "packages").items() if k not in NOTED_PACKAGES}
    variables = {  # those that say how the process computes or communicates
        k: v
        for k, v in section(environment, "variables").items()
        if k.startswith(SETTINGS) or not (k.startswith(IDENTITY) or k.endswith(PLACES))
    }
    plain = {name: environment.get(name) for name in (*VERSIONS, *HOST, "cpu_count")}
    nested = {"packages": packages, "switches": section(environment, "switches"), "variables": variables}
    dotted = {f"{part}.{key}": value for part, values in nested.items() for key, value in values.items()}
    return {key: value for key, value in (plain | dotted).items() if value is not None}


def noted(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The values in which repeats may differ, with a warning."""
    packages = section(environment, "packages")
    plain = {name: environment.get(name) for name in NOTED}
    versions = {f"packages.{name}": packages.get(name) for name in NOTED_PACKAGES}
    return {key: value for key, value in (plain | versions).items() if value is not None}


def of_the_launch(key: str) -> bool:
    """Whether a key of a fingerprint may differ along a curve over GPU counts."""
    return key.partition(".")[0] in OF_THE_LAUNCH
