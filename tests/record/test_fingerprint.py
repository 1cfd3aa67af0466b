"""The part of an environment that repeats of one measurement have in common."""

from __future__ import annotations

import pytest
import torch

from ddlbench.foreign import section
from ddlbench.measure.devices.environment import environment
from ddlbench.record.fingerprint import fingerprint, noted, of_the_launch

FOUND = {
    "python": "3.11.2",
    "driver": "550.54",
    "kernel": "6.1",
    "gpu_power_limit_w": 400.0,
    "gpu_clock_mhz": 1410,
    "memory_total_bytes": 2**34,
    "hostname": "node1",
    "cpu_count": 8,
    "nccl": None,
    "packages": {"deepspeed": "0.19.8", "ddlbench": "0.1.0"},
    "switches": {"cudnn_benchmark": True},
    "variables": {"NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def test_it_has_versions_settings_and_the_kind_of_host_but_not_which_host_or_job():
    assert fingerprint(FOUND) == {
        "python": "3.11.2",
        "driver": "550.54",
        "gpu_power_limit_w": 400.0,
        "cpu_count": 8,
        "packages.deepspeed": "0.19.8",
        "switches.cudnn_benchmark": True,
        "variables.NCCL_ALGO": "Ring",
        "variables.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert noted(FOUND) == {"kernel": "6.1", "packages.ddlbench": "0.1.0"}


@pytest.mark.parametrize("odd", [None, 3, "text", [], {"packages": 3, "variables": None, "switches": []}])
def test_an_environment_of_another_shape_is_an_unknown_one(odd):
    assert fingerprint(section({"environment": odd}, "environment")) == {}


def test_variables_that_name_a_process_or_a_place_do_not_count():
    counted = (
        "NCCL_PROTO", "OMP_NUM_THREADS", "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_btl_tcp_if_include",
        "HSA_FORCE_FINE_GRAIN_PCIE", "LD_PRELOAD", "NCCL_TOPO_FILE",
    )  # fmt: skip
    others = (
        "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MIOPEN_USER_DB_PATH",
        "TRITON_CACHE_DIR", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_TOPO_DUMP_FILE", "UCX_LOG_FILE",
    )  # fmt: skip
    result = fingerprint({"variables": dict.fromkeys((*counted, *others), "1")})
    assert result == {f"variables.{name}": "1" for name in counted}


def test_this_machine_twice_is_the_same():
    one, two = (fingerprint(environment(torch.device("cpu"))) for _ in range(2))
    assert one == two
    assert {"python", "torch", "packages.torch", "cpu_count", "switches.cudnn_benchmark"} <= set(one)


def test_kinds_of_keys():
    assert of_the_launch("variables.NCCL_ALGO")
    assert of_the_launch("cpu_count")
    assert of_the_launch("topology"), "of the GPUs that a job sees"
    assert not of_the_launch("cpu_count_total")
