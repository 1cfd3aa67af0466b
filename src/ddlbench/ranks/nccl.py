"""Variables of torch's NCCL process groups that a run sets."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# torch's NCCL watchdog and its monitor abort the process when they see an error, a hang of 8 minutes or a failed CUDA
# call: then no record would be written. `Supervisor` does the same after the record is written (ProcessGroupNCCL.cpp).
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
OLD_NAMES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}


def disable_nccl_abort(env: MutableMapping[str, str] = os.environ) -> None:
    """Before the process group is made; what the user has set stays, but for TORCH_NCCL_ASYNC_ERROR_HANDLING=1 under
    torchrun, which sets that for its ranks where the user has set nothing."""
    if "TORCHELASTIC_RUN_ID" in env and env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        del env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in NCCL_DEFAULTS.items():
        if OLD_NAMES.get(name, "") not in env:
            env.setdefault(name, value)
