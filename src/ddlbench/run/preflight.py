"""preflight=true: before anything is measured, each rank computes and communicates for a moment; slow ranks are named.

One rank on a slow or broken node slows all others at every step. Each rank multiplies two matrices of ones, because
the result is known, and all ranks add up one buffer. The fastest of a few repetitions counts, because a node may be
loaded for a moment. On a GPU this check has run with one rank.
"""

from __future__ import annotations

import socket
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from ddlbench.errors import RunError, reporting
from ddlbench.measure.clock import idle
from ddlbench.measure.devices.nvml import gpu, gpu_state_reader
from ddlbench.measure.devices.unknown import or_none
from ddlbench.progress import tell
from ddlbench.ranks.control import all_gather, single_process
from ddlbench.ranks.launch import group_timeout
from ddlbench.record.files import write_json
from ddlbench.run.context import Attempt
from ddlbench.texts import first_few

SIDES = {"cpu": 512, "cuda": 4096}  # of the matrices: 10 ms and more on both
REDUCED_BYTES = {"cpu": 2**22, "cuda": 2**26}
WARMUP, REPEATS = 2, 5
FILE = "preflight.json"  # beside run.json: one row a rank
NAMED = 5  # slow ranks that one line names


@dataclass(frozen=True)
class Check:
    """The result of one rank. clock_mhz: of the GPU, after the multiplications; seconds: the fastest repetition."""

    rank: int
    host: str
    device: str
    clock_mhz: int | None
    correct: bool
    matmul_s: float
    all_reduce_s: float | None  # None for one rank
    torch_version: str = ""
    dataset_hash: str = ""


def fastest(work: Callable[[], object], device: torch.device) -> float:
    seconds = timeit.repeat(lambda: (work(), idle(device)), number=1, repeat=WARMUP + REPEATS)
    return min(seconds[WARMUP:])


def _all_reduce_s(device: torch.device, timeout_s: float) -> float:
    """In a group of its own: NCCL's communicator of all ranks would stay in the device's memory during the run."""
    group = dist.new_group(timeout=group_timeout(device, timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    buffer = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
    seconds = fastest(lambda: dist.all_reduce(buffer, group=group), device)
    dist.destroy_process_group(group)
    return seconds


def slow_ranks(checks: Sequence[Check], factor: float) -> list[str]:
    """A line for each rank that multiplies `factor` times as slowly as the median rank, or more; the slowest first."""
    usual = median_low(check.matmul_s for check in checks)
    slow = [check for check in checks if check.matmul_s >= factor * usual]
    return [
        f"rank {check.rank} on {check.host} computes {check.matmul_s / usual:.1f} times as slowly as the "
        f"median rank ({check.matmul_s * 1000:.1f} ms, {usual * 1000:.1f} ms)"
        for check in sorted(slow, key=lambda check: check.matmul_s, reverse=True)
    ]


def require_sound(checks: Sequence[Check], stop: float | None) -> None:
    """RunError for a rank that computes wrongly, or `stop` times as slowly as the median. The same on every rank."""
    remedy = "exclude its node (sbatch --exclude), or have it repaired"
    for check in checks:
        if not check.correct:
            wrong = f"rank {check.rank} on {check.host} computes wrongly: a matrix product of ones is not its size"
            raise RunError(f"pre-flight: {wrong}: {remedy}")
    if stop is not None and (slow := slow_ranks(checks, stop)):
        named = "; ".join(first_few(slow, NAMED))
        raise RunError(f"pre-flight: {named}: {remedy}, or set preflight_stop=null to run with these ranks")


def section(checks: Sequence[Check], device: torch.device, slow: list[str], seconds: float) -> dict[str, Any]:
    """The section `preflight` of run.json."""
    side, times = SIDES[device.type], [check.matmul_s for check in checks]
    reduced = [check.all_reduce_s for check in checks if check.all_reduce_s is not None]
    return {
        "seconds": seconds,
        "matmul_flops_per_s_min": 2 * side**3 / max(times),
        "matmul_flops_per_s_median": 2 * side**3 / median_low(times),
        "slowest_factor": max(times) / median_low(times),
        "all_reduce_bytes": REDUCED_BYTES[device.type] if reduced else None,
        "all_reduce_s": max(reduced, default=None),
        "slow": slow,
    }


def preflight(attempt: Attempt) -> None:
    """Check all ranks, and record the results: a row for each rank in preflight.json. All ranks call this. RunError, on
    every rank, for a rank that is broken or too slow."""
    began = time.perf_counter()
    config, record, device = attempt.config, attempt.record, attempt.device
    side = SIDES[device.type]
    ones = torch.ones(side, side, device=device)
    product = torch.empty_like(ones)
    seconds = fastest(lambda: torch.mm(ones, ones, out=product), device)
    correct = bool((product == side).all().item())
    reader = gpu_state_reader(device)
    clock = or_none(lambda: reader().clock_mhz) if reader else None
    reduced = None if single_process() else _all_reduce_s(device, config.train.timeout_s)
    model = str(gpu(device)["gpu_model"]) if device.type == "cuda" else "cpu"
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the measured run begins with an empty allocator
    here = Check(
        rank=attempt.launch.rank,
        host=socket.gethostname(),
        device=model,
        clock_mhz=clock,
        correct=correct,
        matmul_s=seconds,
        all_reduce_s=reduced,
        torch_version=str(torch.__version__),
        dataset_hash=str(attempt.dataset["hash"]),
    )
    checks: list[Check] = all_gather(here)
    slow = slow_ranks(checks, config.preflight_warn)
    if record:
        path = record.folder / FILE
        with reporting(f"{path} cannot be written", "free space or choose another results_dir=", RunError):
            write_json(path, {"ranks": [asdict(check) for check in checks]})
        record.add(preflight=section(checks, device, slow, time.perf_counter() - began))
        for line in slow[:NAMED]:
            tell(f"warning: {line}")
    require_sound(checks, config.preflight_stop)
