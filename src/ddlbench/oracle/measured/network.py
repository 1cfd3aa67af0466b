"""--calibrate-network: seconds of collectives between processes of this machine, and by how much the processes slow
each other down.

There is one process per rank, over gloo on CPUs and NCCL on GPUs. Each collective runs at several sizes and with
several numbers of ranks, only within one node. Its seconds are the seconds that it adds to computing. In a step the
ranks compute before it: they do not arrive at the same time, the message has left the cache, and if ranks share cores
the last rank to send waits for a core. On a CPU the same collectives take half as long if the ranks do not compute
between a barrier and the collective.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import conv2d

from ddlbench.data.home import home
from ddlbench.errors import Unavailable, UserError, reporting
from ddlbench.files import replace_json
from ddlbench.frameworks.tensor.collectives import all_gather, reduce_scatter
from ddlbench.measure.clock import idle
from ddlbench.measure.formulas.memory_formula import FP32_BYTES
from ddlbench.oracle.machine.machine import Machine, Sweep

SIZES = (2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**26)  # bytes of the whole message
REPEATS = 5
ROUNDS, ROWS = 8, 1  # of computing and sending in one repeat; images of a pass before a collective: a few milliseconds
HIDDEN, PASSES, HIDDEN_REPEATS = 2**23, 10, 9  # bytes of an all-reduce, and passes of a convolution beside it
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TIMEOUT_S, PROCESS_BYTES = 300, 2**29  # of a process with torch


def path(device_type: str) -> Path:
    return home() / "oracle" / f"network-{platform.node()}-{device_type}.json"


def versions(device_type: str) -> dict[str, str]:
    """The host, device and version of torch that a calibration is valid for."""
    return {"host": platform.node(), "device": device_type, "torch": str(torch.__version__)}


def calibrate(device_type: str, counts: Sequence[int], sizes: Sequence[int] = SIZES) -> Path:
    """Measure, and write the file; its path. UserError if there are too few devices, Unavailable if a process fails."""
    if not counts:
        raise UserError("--calibrate-network measures between ranks: give gpus= with 2 or more, such as gpus=[2,4]")
    if device_type == "cuda" and (devices := torch.cuda.device_count()) < max(counts):
        raise UserError(f"--calibrate-network: {max(counts)} ranks need as many GPUs, this machine has {devices}")
    if max(counts) > (most := psutil.virtual_memory().available // PROCESS_BYTES):
        raise UserError(f"--calibrate-network: {max(counts)} processes do not fit in memory: give gpus= up to {most}")
    seconds = dict[str, dict[str, list[float]]]()  # collective -> number of ranks -> seconds by size
    contention, cost = dict[str, float](), dict[str, float]()
    for ranks in counts:
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.start_processes(_rank, args=(device_type, ranks, folder, sizes), nprocs=ranks, start_method="spawn")  # pyright: ignore
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # pyright: ignore
                reason, backend = str(error).strip().splitlines()[-1], BACKENDS[device_type]
                raise Unavailable(
                    f"--calibrate-network with {ranks} processes failed ({reason}): check that {backend} works here"
                ) from error
            measured = json.loads((Path(folder) / "measured.json").read_text())
        contention[str(ranks)], cost[str(ranks)] = measured["contention"], measured["hidden_cost"]
        for kind, of_sizes in measured["seconds"].items():
            seconds.setdefault(kind, {})[str(ranks)] = of_sizes
    content = {"sizes": list(sizes), "seconds": seconds, "contention": contention, "hidden_cost": cost}
    target = path(device_type)
    keep(target, {**versions(device_type), **content})
    return target


def keep(file: Path, content: Any) -> None:
    """Write a calibration. UserError if that is not possible."""
    with reporting(f"the calibration {file} cannot be written", "set DDLBENCH_HOME to another folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_json(file, content)


def calibrated(machine: Machine) -> Machine:
    """The machine with the values measured on this host with this version of torch; unchanged without them."""
    kept = path(machine.device.type)
    if not kept.is_file():
        return machine
    try:
        content = cast(dict[str, Any], json.loads(kept.read_text()))
        if {key: content.get(key) for key in versions("")} == versions(machine.device.type):
            sizes = tuple(map(float, content["sizes"]))
            sweeps = {
                (kind, int(ranks)): Sweep(sizes, tuple(map(float, seconds)))
                for kind, counts in content["seconds"].items()
                for ranks, seconds in counts.items()
            }
            contention = {int(ranks): max(1.0, factor) for ranks, factor in content["contention"].items()}
            cost = {int(ranks): float(factor) for ranks, factor in content.get("hidden_cost", {}).items()}
            return replace(machine, sweeps=sweeps, contention=contention, hidden_cost=cost)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{kept} cannot be used ({error!r}): run --calibrate-network again") from error
    raise UserError(
        f"{kept} was measured with torch {content.get('torch')} on {content.get('host')}, this is torch "
        f"{torch.__version__} on {platform.node()}: run --calibrate-network again"
    )


def _rank(rank: int, device_type: str, ranks: int, folder: str, sizes: Sequence[int]) -> None:
    """One process."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init, timeout = f"file://{folder}/store", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(BACKENDS[device_type], init_method=init, rank=rank, world_size=ranks, timeout=timeout)
    measured = {
        "seconds": sweep(device, sizes),
        "contention": contention(rank, device),
        "hidden_cost": hidden_cost(device),
    }
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def sweep(device: torch.device, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each collective by size, between all ranks. Every rank calls this."""
    return {kind: [slowest(run, size, device) for size in sizes] for kind, run in COLLECTIVES.items()}


def slowest(run: Callable[[Tensor], object], size: int, device: torch.device) -> float:
    """Seconds that a collective adds to computing: the median over repeats of the slowest rank, but at least its time
    alone. Its memory was used before. All ranks have equal shares of the message, which may add some numbers to it."""
    share = -(-size // FP32_BYTES // dist.get_world_size())
    tensor, compute = torch.ones(share * dist.get_world_size(), device=device), computing(device, ROWS)

    def rounds(sends: bool) -> None:
        for _ in range(ROUNDS):
            compute()
            if sends:
                run(tensor)

    rounds(sends=True)
    alone = median(_timed(lambda: run(tensor), device) for _ in range(REPEATS))
    with_sending, without = partial(rounds, True), partial(rounds, False)
    added = median(_timed(with_sending, device) - _timed(without, device) for _ in range(REPEATS))
    return max(alone, added / ROUNDS)


def contention(rank: int, device: torch.device) -> float:
    """Seconds of a convolution while every rank computes one, divided by its seconds while only rank 0 does."""
    dist.barrier()
    alone = torch.tensor(_convolve(device) if rank == 0 else 0.0)
    dist.barrier()
    together = torch.tensor(_convolve(device))
    total = torch.stack([alone, together]).to(device)
    dist.all_reduce(total)
    return float(total[1] / dist.get_world_size() / total[0])


def hidden_cost(device: torch.device) -> float:
    """The seconds that an all-reduce adds to computing that runs beside it, on the slowest rank, as a share of the
    all-reduce's time alone. 0: it is free; 1: sending during the backward pass gains nothing."""
    message, compute = torch.ones(HIDDEN // FP32_BYTES, device=device), computing(device, 8)

    def passes() -> None:
        """Without waiting for the device, which on a GPU would wait for the all-reduce, too."""
        for _ in range(PASSES):
            compute()

    def beside() -> None:
        work = dist.all_reduce(message, async_op=True)
        passes()
        assert work is not None
        work.wait()

    repeats = [
        [_timed(run, device) for run in (lambda: dist.all_reduce(message), passes, beside)]
        for _ in range(HIDDEN_REPEATS)
    ]
    alone, plain, both = (median(seconds) for seconds in zip(*repeats[1:], strict=True))
    return min(1.0, max(0.0, (both - plain) / alone))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    run()
    idle(device)
    took = torch.tensor(time.perf_counter() - began, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _convolve(device: torch.device) -> float:
    """Seconds of some forward and backward passes, which take long enough for a fair share of the cores."""
    compute = computing(device, 8)
    compute()
    idle(device)
    began = time.perf_counter()
    for _ in range(40):
        compute()
    idle(device)
    return time.perf_counter() - began


def computing(device: torch.device, rows: int) -> Callable[[], None]:
    """A forward and a backward pass of a convolution. rows: images in it"""
    images = torch.ones(rows, 64, 32, 32, device=device)
    weight = torch.ones(64, 64, 3, 3, device=device, requires_grad=True)
    return lambda: conv2d(images, weight, padding=1).sum().backward()


def _share(tensor: Tensor) -> Tensor:
    """A copy of one rank's share."""
    return tensor.chunk(dist.get_world_size())[0].clone()


def _send(tensor: Tensor) -> None:
    """Send from rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)


COLLECTIVES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "all_gather": lambda tensor: all_gather(tensor, _share(tensor)),
    "reduce_scatter": lambda tensor: reduce_scatter(_share(tensor), tensor),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "send": _send,
}
