"""Settings of `train.` that need something of the machine (cores, bf16, files whose pages can be dropped), dry runs for
another machine, and torch's global switches."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ddlbench.config.keys import Train
from ddlbench.data.feed import Dataset, Loader
from ddlbench.data.page_cache import Dropped, drop
from ddlbench.errors import Unsupported, UserError
from ddlbench.measure.formulas import flops
from ddlbench.ranks.control import once_per_node
from ddlbench.texts import counted

if TYPE_CHECKING:
    from ddlbench.run.context import Attempt
    from ddlbench.run.supervisor import Supervisor

WORKERS_PER_CORE = 4  # what reads also waits for storage: more of it than cores can be right
OFF = "or set train.cold_cache=false"


def check_machine(threads: int, loader: Loader, cores: int) -> None:
    """UserError for more threads or workers of a rank than the cores of a machine can run."""
    allowed: dict[str, tuple[int | None, int]] = {"train.threads_per_rank": (threads, cores)}
    if key := loader.parallel_key:
        allowed[f"loader.{key}"] = (getattr(loader, key), WORKERS_PER_CORE * cores)
    for key, (value, most) in allowed.items():
        if value is not None and value > most:
            raise UserError(
                f"{key}={value} is too many for a rank (this machine has {counted(cores, 'core')}): give at most {most}"
            )


def check_precision(train: Train, device: torch.device) -> None:
    """Unsupported for bf16 on a GPU without it."""
    if train.precision == "bf16" and device.type == "cuda" and torch.cuda.is_available():
        emulated = not torch.cuda.is_bf16_supported(including_emulation=False)
        flops.check_precision(train.precision, torch.cuda.get_device_name(device), emulated)


def planned_device(dryrun: bool) -> torch.device | None:
    """The device of a dry run for another machine: DDLBENCH_PLAN=cuda or cpu, with a launcher's variables for the
    ranks (RANK=0 WORLD_SIZE=8 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=x MASTER_PORT=1). None: this machine's."""
    kind = os.environ.get("DDLBENCH_PLAN")
    if not kind:
        return None
    if kind not in ("cuda", "cpu") or not dryrun:
        raise UserError(f"DDLBENCH_PLAN={kind} goes with dryrun=true and is cuda or cpu: unset it to run")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def set_switches(train: Train, device: torch.device) -> None:
    """Set torch's global switches; measure/devices/environment.py records them."""
    if device.type == "cpu":
        torch.set_num_threads(train.threads_per_rank)
    else:  # torch's own default is TF32 for convolutions and fp32 for matrix products
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = train.tf32
        torch.backends.cudnn.benchmark = train.cudnn_benchmark is not False and not train.deterministic
    if not train.deterministic:
        return
    # Every run on the same devices gives the same bits; an operation without a deterministic algorithm ends the run.
    # cuBLAS reads its variable at its first use: before any work on a device. A value that the user has set stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of the two values that CUDA's documentation names
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def check_cold_cache(loader: Loader, data: Dataset) -> None:
    """Raise Unsupported if pages would stay in memory, or if no file is read."""
    if not hasattr(os, "posix_fadvise"):
        raise Unsupported(f"train.cold_cache=true needs posix_fadvise, which {sys.platform} lacks: use Linux, {OFF}")
    if not loader.drops_cache:
        raise Unsupported(
            f"train.cold_cache=true needs a loader that reads files and maps none, loader {loader.name} does "
            f"not: choose loader=native, {OFF}"
        )
    if data.mapped:
        remedy = "data.tokenize=on_the_fly" if data.kind == "text" else "data=imagenet"
        raise Unsupported(
            f"train.cold_cache=true needs files that are read, data {data.name} are memory-mapped and mapped "
            f"pages cannot be dropped: choose {remedy}, {OFF}"
        )


def drop_data(attempt: Attempt, supervisor: Supervisor, epoch: int) -> None:
    """train.cold_cache=true: drop the files of both splits from the memory of every node. Every rank calls this before
    the clock of a training epoch starts. Unsupported, on every rank, where no page could be dropped."""
    data, local_rank, record = attempt.config.data, attempt.launch.local_rank, attempt.record
    with supervisor.unlimited():  # opening a million files takes its time
        nodes = once_per_node(local_rank, lambda: drop(data.files_read()), f"ddlbench/cold_cache/{epoch}")
    dropped = Dropped.total(nodes)
    if record:
        epochs = 1 + record.content.get("cold_cache", {"epochs": 0})["epochs"]  # of this attempt
        record.add(cold_cache={**asdict(dropped), "nodes": len(nodes), "epochs": epochs})
    if dropped.bytes and dropped.left_bytes == dropped.bytes:
        raise Unsupported(
            f"train.cold_cache=true: all {dropped.bytes} bytes of the data are still in memory, as in a file "
            f"system without a disk (tmpfs): choose another data.root or data.stage_to, {OFF}"
        )
