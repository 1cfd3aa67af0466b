"""python -m ddlbench.rehearse: one rank of the real job, for any number of ranks, on one machine without devices.

The framework sets up and trains some steps under a fake process group and fake tensors (ranks/fake.py): nothing is sent
or computed, everything has its shape. The last step is reported: earlier ones make what lasts, and fill a pipeline.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ddlbench.config.compose import configuration, configurations
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, UserError
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.horovod.adapter import Horovod
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Batch, Job, Place, Trainer
from ddlbench.oracle import observed
from ddlbench.oracle.question import Parser, numbers
from ddlbench.oracle.reason import size
from ddlbench.ranks.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.run.attempt import make_job

STEPS = 3
OWN = ("gpus", "device", "rank", "gpus_per_node")
HOST_READS = "on the CPU these include numbers that are on the host on a GPU too, such as step counters and seeds"


@dataclass(frozen=True)
class Rehearsal:
    """One rank. None: not rehearsed, for the reason in `left_out`.

    memory: bytes of parameters, gradients and optimizer; storages, each once
    collectives: of a step by name: count and bytes, of the whole message that a group's ranks end with or start from
    host_reads: calls of a step in which the host waits for a number, by call and line
    error: what does not fit together, and where
    """

    framework: str
    model: str
    gpus: int
    device: str
    rank: int
    coordinates: dict[str, int] = field(default_factory=dict[str, int])
    memory: dict[str, int | None] | None = None
    collectives: dict[str, dict[str, int]] | None = None
    host_reads: dict[str, int] | None = None
    left_out: str | None = None
    error: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where the job does not fit together, 2 for errors of the user."""
    try:
        found = answer(sys.argv[1:] if arguments is None else arguments)
    except RunError as error:
        print(f"ddlbench.rehearse: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0 if found.error is None else 1


def answer(arguments: Sequence[str]) -> Rehearsal:
    parser = Parser(
        prog="python -m ddlbench.rehearse",
        usage="%(prog)s +framework=NAME +model=NAME gpus=1024 [device=cuda] [rank=0] [gpus_per_node=4] [key=value ...]",
        description="Builds one rank of the real job without devices: memory, collectives, reads of the host, errors.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/oracle.md explains its keys")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    given = dict(word.split("=", 1) for word in options.words if "=" in word)
    gpus, per_node = (numbers(given.get(key, default))[0] for key, default in (("gpus", "1"), ("gpus_per_node", "8")))
    rank, device = given.get("rank", "0"), given.get("device", "cpu")
    if not rank.isdecimal() or int(rank) >= gpus:
        raise UserError(f"rank={rank} must be a number from 0 to {gpus - 1}")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device} must be cpu or cuda")
    with configurations():
        config = configuration(*(word for word in options.words if word.split("=", 1)[0] not in OWN))
    per_node = min(per_node, gpus)
    launch = Launch("torchrun", int(rank), gpus, int(rank) % per_node, per_node)
    found = rehearse(config, launch, torch.device(device, 0) if device == "cuda" else torch.device(device))
    print(json.dumps(asdict(found), indent=1) if options.json else text(found))
    return found


def rehearse(config: Config, launch: Launch, device: torch.device) -> Rehearsal:
    """UserError, Unsupported or Unavailable where the framework refuses the job."""
    job = make_job(config, launch, device)
    framework: Any = config.framework
    row = Rehearsal(framework.name, config.model.name, job.world_size, device.type, job.rank)
    nothing, no_step = limits(framework, job)
    if nothing:
        return replace(row, left_out=nothing)
    framework.check(job)
    with warnings.catch_warnings(), fake_world(job.rank, job.world_size, device):
        warnings.simplefilter("ignore")  # fake tensors warn of what they cannot know
        try:
            trainer = framework.setup(job)
            place = trainer.place
            row = replace(row, coordinates=dict(place.coordinates), memory=memory(trainer), left_out=no_step)
            return row if no_step else stepped(row, trainer, job)
        except RunError:
            raise
        except Exception as error:  # whatever a library raises is what does not fit together
            return replace(row, error=" ".join(f"{type(error).__name__}: {error}".split())[:500] + line(error))


def limits(framework: Any, job: Job) -> tuple[str | None, str | None]:
    """Why nothing can be rehearsed, and why no step can; None where it can."""
    if isinstance(framework, Horovod):
        return "Horovod's library needs its peers: nothing is rehearsed", None
    if isinstance(framework, DeepSpeed):
        if job.device.type == "cuda":
            return "DeepSpeed on cuda asks the driver: nothing is rehearsed; try device=cpu", None
        if framework.zero_stage == 3:
            return (
                None,
                "DeepSpeed's stage 3 compares numbers that rank 0 sends, the fake group sends none: no step",
            )
    if job.device.type == "cuda":
        return None, "a step on cuda asks the driver for streams: no step; try device=cpu for its collectives"
    if reduces(framework, job):
        return None, "DDP's reducer refuses what the fake process group returns: no step"
    return None, None


def reduces(framework: Any, job: Job) -> bool:
    """Whether replicas average their gradients by DDP's reducer."""
    if isinstance(framework, TensorParallel):
        return framework.dp > 1
    return isinstance(framework, DDP | LocalSGD) and job.world_size > 1


def stepped(row: Rehearsal, trainer: Trainer, job: Job) -> Rehearsal:
    """With what the last step sends and reads."""
    batch = fake_batch(job, trainer.place) if trainer.place.reads_data else None
    reads, gradients = Counter[tuple[str, str]](), [0]
    operations = observed.Operations(reads)
    observed.before_update(trainer, lambda: gradients.append(observed.stored(observed.gradients(trainer), set())))
    for _ in range(STEPS):
        for counts in (reads, operations.counts, operations.bytes_):
            counts.clear()
        with operations, observed.Reads(reads):
            trainer.step(batch)
    return replace(
        row,
        memory=memory(trainer) | {"gradients": max(gradients) or None},
        collectives={name: {"count": n, "bytes": operations.bytes_[name]} for name, n in operations.counts.items()},
        host_reads={f"{call} at {place}": count for (call, place), count in reads.items()},
    )


def fake_batch(job: Job, place: Place) -> Batch:
    samples, shape = job.replica_batch(place.data_size), job.model.input_shape()
    targets = torch.zeros(samples, *(shape if job.model.kind == "text" else ()), dtype=torch.int64, device=job.device)
    inputs = targets if job.model.kind == "text" else torch.zeros(samples, *shape, device=job.device)
    valid = torch.ones(samples, dtype=torch.bool, device=job.device)
    return Batch(inputs, targets, valid).to(job.device, job.channels_last)


def memory(trainer: Trainer) -> dict[str, int | None]:
    """The optimizer's own copies of the weights count as its own. Its state is made by the first update."""
    counted = set[int]()
    parameters = observed.stored(observed.parameters(trainer), counted)
    state = observed.optimizer_state(trainer)
    optimizer = observed.stored([*observed.updated(trainer), *state], counted) if state else None
    return {"parameters": parameters, "gradients": None, "optimizer": optimizer}


def line(error: Exception) -> str:
    """The last line of ddlbench that was on the way to an error."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/ddlbench/" in file and not file.endswith("rehearsal.py"):
            found = f" at {observed.short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def text(found: Rehearsal) -> str:
    where = ", ".join(f"{name} {index}" for name, index in found.coordinates.items())
    lines = [
        f"{found.framework}, {found.model}: rank {found.rank} of {found.gpus} on {found.device}"
        + (f" ({where})" if where else "")
    ]
    for name, bytes_ in (found.memory or {}).items():
        lines.append(f"memory: {name}: {'not known' if bytes_ is None else size(bytes_)}")
    for name, each in (found.collectives or {}).items():
        lines.append(f"collective of a step: {name}: {each['count']} x, {size(each['bytes'])} altogether")
    lines += [f"host read of a step: {call}: {count} x" for call, count in (found.host_reads or {}).items()]
    lines += [HOST_READS] if found.host_reads else []
    lines += [f"not rehearsed: {found.left_out}"] if found.left_out else []
    lines += [f"does not fit together: {found.error}"] if found.error else []
    return "\n".join(lines)
