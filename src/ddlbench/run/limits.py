"""What this machine can give to one rank, and dry runs for another machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ddlbench.data.feed import Loader
from ddlbench.errors import UserError

WORKERS_PER_CORE = 4  # what reads also waits for storage: more of it than cores can be right


def check_machine(threads: int, loader: Loader, cores: int | None = None) -> None:
    """UserError for more threads or workers a rank than the cores of this machine can carry. `cores`: None asks."""
    cores = cores or os.cpu_count() or 1
    allowed: dict[str, tuple[int | None, int]] = {"train.threads_per_rank": (threads, cores)}
    for key, number in loader.parallelism().items():
        allowed[f"loader.{key}"] = (number, WORKERS_PER_CORE * cores)
    for key, (value, most) in allowed.items():
        if value is not None and value > most:
            has = f"this machine has {cores} core{'s' if cores > 1 else ''}"
            raise UserError(f"{key}={value} is too many for a rank ({has}): give at most {most}")


def planned_device(dryrun: bool, env: Mapping[str, str] = os.environ) -> torch.device | None:
    """The device of a dry run for another machine: DDLBENCH_PLAN=cuda or cpu, with a launcher's variables for the
    ranks (RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=x MASTER_PORT=1). None: this machine's."""
    kind = env.get("DDLBENCH_PLAN")
    if not kind:
        return None
    if kind not in ("cuda", "cpu") or not dryrun:
        raise UserError(f"DDLBENCH_PLAN={kind} goes with dryrun=true and is cuda or cpu: unset it to run")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
