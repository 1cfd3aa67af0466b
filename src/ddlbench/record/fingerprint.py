"""The part of a record's `environment` that repeats must share: versions, driver, switches, variables, kind of host.

Plain data in, plain data out: the run compares its ranks by it, the report decides by it what is a repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ddlbench.ranks.launchers import PLACE_VARIABLES

# Versions beside those of the packages.
VERSIONS = ("python", "torch", "cuda", "cudnn", "nccl", "driver")
# The kind of host and its settings.
HOST = (
    "cpu_model", "cpu_count_total", "gpu_model", "gpu_power_limit_w", "gpu_clock_max_mhz", "gpu_ecc", "topology",
)  # fmt: skip
# Differs with the number of ranks on a host too: separates repeats, but not the points of a curve.
OF_THE_LAUNCH = ("cpu_count", "variables")
# Named in a warning where repeats that are merged differ in it.
NOTED = ("kernel", "git_commit", "git_dirty", "gpu_persistence", "gpu_memory_clock_max_mhz", "cuda_module_loading")
# Packages that read the configuration or write the record: they cannot change a measurement.
NOTED_PACKAGES = ("ddlbench", "hydra-core", "omegaconf", "pandas", "pyarrow", "nvidia-ml-py")

# Variables that say which process this is, or where files lie, not how it computes.
IDENTITY = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "DDLBENCH_", *PLACE_VARIABLES,
)  # fmt: skip
SETTINGS = ("OMPI_MCA_btl", "OMPI_MCA_coll", "OMPI_MCA_mtl", "OMPI_MCA_pml")  # of those, the settings
PLACES = ("_CACHE_DIR", "_CACHE_PATH", "_HOME", "_DEBUG_FILE", "_EXTENSIONS_DIR", "_DB_PATH", "CUDA_PATH", "HIP_PATH")


def fingerprint(environment: object) -> dict[str, Any]:
    """The values that repeats must share, by dotted keys; unknown ones are left out.

    environment: the section of run.json, of any shape where others wrote it
    """
    recorded = _section(environment)
    packages = {k: v for k, v in _section(recorded.get("packages")).items() if k not in NOTED_PACKAGES}
    # Those that say how the process computes or communicates.
    variables = {
        k: v
        for k, v in _section(recorded.get("variables")).items()
        if k.startswith(SETTINGS) or not (k.startswith(IDENTITY) or k.endswith(PLACES))
    }
    plain = {name: recorded.get(name) for name in (*VERSIONS, *HOST, "cpu_count")}
    nested = {"packages": packages, "switches": _section(recorded.get("switches")), "variables": variables}
    dotted = {f"{section}.{key}": value for section, values in nested.items() for key, value in values.items()}
    return {key: value for key, value in (plain | dotted).items() if value is not None}


def noted(environment: object) -> dict[str, Any]:
    """The values in which repeats may differ, with a warning."""
    recorded = _section(environment)
    packages = _section(recorded.get("packages"))
    plain = {name: recorded.get(name) for name in NOTED}
    versions = {f"packages.{name}": packages.get(name) for name in NOTED_PACKAGES}
    return {key: value for key, value in (plain | versions).items() if value is not None}


def of_the_launch(key: str) -> bool:
    """Whether a key of a fingerprint may differ along a curve over GPU counts."""
    return key.partition(".")[0] in OF_THE_LAUNCH


def is_version(key: str) -> bool:
    """Whether a key of a fingerprint is a version of a library that all ranks must share."""
    return key.startswith("packages.") or key in ("torch", "cuda", "cudnn", "nccl")


def _section(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
