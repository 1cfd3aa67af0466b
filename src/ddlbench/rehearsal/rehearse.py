"""One rank of the real job, for any number of ranks, on one machine without devices.

The framework sets up and trains some steps under a fake process group and fake tensors (ranks/fake): nothing is sent or
computed, but every tensor has its shape. The last step is reported: the steps before it create the optimizer's state
and fill a pipeline. mode=rehearsal prints the result; nothing is measured, so nothing is recorded.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ddlbench.config.compose import make_job
from ddlbench.config.schema import Config
from ddlbench.data.loaders import replica_feed
from ddlbench.data.loaders.replica_feed import ToDevice
from ddlbench.errors import RunError, UserError, reporting
from ddlbench.job import Batch, Job, Place, Trainer, example_batch
from ddlbench.measure.clock import EpochClock
from ddlbench.ranks.fake.fake import fake_world
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.observed import Group, Observed, Operation, before_update, held, memory, raised_at, stored
from ddlbench.texts import bytes_text

WARM_UP = 2  # steps before the reported one
ON_CPU = (
    "on the CPU this includes numbers that stay on the host where the device is a GPU, such as step counters and seeds"
)


@dataclass(frozen=True)
class Sent:
    """The collectives of one kind that a step sends in groups of `ranks` ranks with distance `stride`. bytes_: of
    complete messages, which all ranks of a group start from or end with."""

    kind: str
    ranks: int
    stride: int
    count: float
    bytes_: float

    @property
    def sent_bytes(self) -> float:
        """What one rank puts on the wire in a ring (Patarasuk and Yuan 2009): an all-reduce is a reduce-scatter and an
        all-gather, each of which sends all shares but one. A message counts on the rank that sends it."""
        if self.kind in ("send", "recv"):
            return self.bytes_ if self.kind == "send" else 0.0
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.ranks - 1) / self.ranks * self.bytes_


@dataclass(frozen=True)
class Rehearsal:
    """What one rank holds and sends. None: not known, because the step was not reached.

    memory: bytes of parameters, gradients and optimizer (each storage once), and the peak of a step
    host_waits: the number of calls in a step in which the host waits for its device, by call and line
    operations: all of the step, or of the steps after which they repeat; they are not printed
    error: what does not fit together, with the line
    """

    framework: str
    model: str
    gpus: int
    device: str
    rank: int
    coordinates: dict[str, int] = field(default_factory=dict[str, int])
    replicas: int = 1
    memory: dict[str, int | None] | None = None
    collectives: tuple[Sent, ...] | None = None
    host_waits: dict[str, float] | None = None
    flops: float | None = None
    error: str | None = None
    operations: tuple[Operation, ...] = field(default=(), repr=False, compare=False)

    @property
    def sent_bytes(self) -> float | None:
        """On the wire, in a step."""
        return None if self.collectives is None else sum(sent.sent_bytes for sent in self.collectives)

    def printed(self) -> dict[str, Any]:
        """The keys of the JSON."""
        values = asdict(replace(self, operations=())) | {"sent_bytes": self.sent_bytes}
        return {key: value for key, value in values.items() if key != "operations"}


class Slice(NamedTuple):
    """Something that lasts, on one track of one process; start and length in seconds. overlaps: slices of this track
    may overlap."""

    process: str
    track: str
    name: str
    start: float
    seconds: float
    args: Mapping[str, Any] = {}
    overlaps: bool = False


def rehearsal(config: Config, launch: Launch) -> int:
    """The exit code: 1 if the job does not fit together."""
    if launch.world_size > 1:
        raise UserError(
            f"mode=rehearsal runs in one process and {launch.launcher} started {launch.world_size}: start python -m "
            "ddlbench by itself, and give the number of ranks with rehearsal.gpus"
        )
    asked = config.rehearsal
    per_node = min(asked.gpus_per_node, asked.gpus)
    rank = Launch("torchrun", asked.rank, asked.gpus, asked.rank % per_node, per_node)
    row = rehearse(config, rank, torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu"))
    print(json.dumps(row.printed(), indent=1) if asked.json else text(row))
    if asked.trace is not None and row.error is None:
        write_trace(Path(asked.trace), slices(row))
    return 0 if row.error is None else 1


def text(row: Rehearsal) -> str:
    place = ", ".join(f"{name} {index}" for name, index in row.coordinates.items())
    rank = f"rank {row.rank} of {row.gpus} on {row.device}{f' ({place})' if place else ''}"
    lines = [f"{row.framework}, {row.model}: {rank}"]
    for name, bytes_ in (row.memory or {}).items():
        lines.append(f"memory: {name}: {'not known' if bytes_ is None else bytes_text(bytes_)}")
    for sent in row.collectives or ():
        group, size = f"{sent.ranks} ranks, {sent.stride} apart", bytes_text(sent.bytes_)
        lines.append(f"collective of a step: {sent.kind} among {group}: {sent.count:g} x, {size} altogether")
    if row.sent_bytes is not None:
        lines.append(f"a rank puts on the wire in a step: {bytes_text(row.sent_bytes)}")
    lines += [f"the host waits in a step: {call}: {count:g} x" for call, count in (row.host_waits or {}).items()]
    lines += [ON_CPU] if row.host_waits and row.device == "cpu" else []
    lines += [f"does not fit together: {row.error}"] if row.error else []
    return "\n".join(lines)


def slices(row: Rehearsal) -> Iterator[Slice]:
    """The operations in their order. Nothing is measured: each of them takes one microsecond of the time axis."""
    process = f"{row.framework}: rank {row.rank} of {row.gpus}, one operation per microsecond (not measured)"
    for number, (name, flops, bytes_, group, peer) in enumerate(row.operations):
        sent = {"flops": flops} if group is None else {**group._asdict(), "peer": peer}
        track = "computing" if group is None else "communication"
        yield Slice(process, track, name, number * 1e-6, 1e-6, {"bytes": bytes_, **sent})


def write_trace(file: Path, slices: Iterable[Slice]) -> None:
    """Write a timeline for ui.perfetto.dev, in the Chrome trace format
    (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, Trace Event Format). UserError if
    the file cannot be written.

    Processes and tracks get numbers in their order. Complete events (X) of one track must not overlap, asynchronous
    ones (b, e) may. What takes no time is left out."""
    lasting = [item for item in slices if item.seconds > 0]
    processes = {name: pid for pid, name in enumerate(dict.fromkeys(item.process for item in lasting), 1)}
    tracks = {key: tid for tid, key in enumerate(dict.fromkeys(item[:2] for item in lasting), 1)}
    events = list[dict[str, Any]]()
    for name, pid in processes.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for (process, name), tid in tracks.items():
        place = {"pid": processes[process], "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
    for number, item in enumerate(lasting):
        event = {"name": item.name, "pid": processes[item.process], "tid": tracks[item[:2]], "args": dict(item.args)}
        if item.overlaps:
            event |= {"cat": item.track, "id": number}
            events.append(event | {"ph": "b", "ts": item.start * 1e6})
            events.append(event | {"ph": "e", "ts": (item.start + item.seconds) * 1e6})
        else:
            events.append(event | {"ph": "X", "ts": item.start * 1e6, "dur": item.seconds * 1e6})
    with reporting(f"the trace {file} cannot be written", "choose another file"):
        file.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def rehearse(config: Config, launch: Launch, device: torch.device) -> Rehearsal:
    """UserError, Unsupported or Unavailable if the framework refuses the job."""
    return rehearse_job(config.framework, make_job(config, launch, device), config.loader.pinned)


def rehearse_job(framework: Any, job: Job, pinned: bool | None = None) -> Rehearsal:
    """pinned: whether batches come from pinned memory of the host; None where they are on the device"""
    device = job.device
    row = Rehearsal(framework.name, job.model.name, job.world_size, device.type, job.rank)
    # A process creates the tensors that normalize images once. Those of a rehearsal are fake and must end with it.
    constants = patch.object(replica_feed, "mean_and_std", cache(replica_feed.mean_and_std.__wrapped__))
    with warnings.catch_warnings(), fake_world(job.rank, job.world_size, device, framework), constants:
        warnings.simplefilter("ignore")  # fake tensors warn that they have no values
        framework.check(job)
        observed = Observed(device)
        try:
            with observed.observing():
                trainer = framework.setup(job)
                place = trainer.place
                row = replace(row, coordinates=dict(place.coordinates), replicas=place.data_size)
                batches = EpochClock(device, barrier=lambda: None).steps(fed(job, place, pinned))
                row = stepped(row, trainer, batches, observed, period=getattr(framework, "local_steps", 1))
                trainer.close()
                return row
        except RunError:
            raise
        except Exception as error:  # whatever a library raises is what does not fit together
            return replace(row, error=" ".join(f"{type(error).__name__}: {error}".split())[:500] + raised_at(error))


def fed(job: Job, place: Place, pinned: bool | None) -> Iterator[Batch | None]:
    """Endless batches without content, copied from the host to the device as in a run.

    pinned: whether a loader leaves batches in pinned memory; None: it leaves them on the device
    """
    if not place.reads_data:
        return repeat(None)
    copied = pinned is not None and job.device.type != "cpu"

    def example() -> Batch:
        with torch.device("cpu" if copied else job.device):
            batch = example_batch(job.model, job.replica_batch(place.data_size))
        if not copied:
            return batch
        # Images of the host are bytes where there is a GPU, which normalizes them.
        inputs = batch.inputs.byte() if batch.inputs.is_floating_point() else batch.inputs
        tensors = (inputs, batch.targets, batch.valid)
        return Batch(*(tensor.pin_memory() for tensor in tensors) if pinned else tensors)

    batches = (example() for _ in repeat(None))
    if copied:
        return ToDevice(job.device, job.channels_last)(batches)
    return (batch.to(job.device, job.channels_last) for batch in batches)


def stepped(row: Rehearsal, trainer: Trainer, batches: Iterator[Any], observed: Observed, period: int) -> Rehearsal:
    """The row with what a step holds, sends and waits for, averaged over `period` steps, after which they repeat."""
    gradient_bytes = list[int]()
    before_update(trainer, lambda: gradient_bytes.append(stored(held(trainer)[2], set())))
    # Some pipelines keep so many minibatches in flight between two steps; until then they are not full.
    facts = trainer.facts()
    in_flight = max(facts.get("staleness_theoretical") or [0])
    for _ in range(max(WARM_UP + in_flight, facts.get("alike_after", 0))):
        trainer.step(next(batches))
    observed.clear()
    for _ in range(period):
        trainer.step(next(batches))
    sizes: dict[Group, list[int]] = {}
    for operation in observed.operations:
        if operation.group is not None:
            sizes.setdefault(operation.group, []).append(operation.bytes_)
    sent = tuple(Sent(*group, len(bytes_) / period, sum(bytes_) / period) for group, bytes_ in sizes.items())
    waits = {f"{call} at {place}": count / period for (call, place), count in observed.waits.items()}
    bytes_ = memory(trainer, gradient_bytes, observed.alive.peak)
    flops = sum(operation.flops for operation in observed.operations) / period
    operations = tuple(observed.operations)
    return replace(row, memory=bytes_, collectives=sent, host_waits=waits, flops=flops, operations=operations)
