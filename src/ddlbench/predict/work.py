"""What a step computes, block by block (`--blocks`), and what it sends (`--check-volumes`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch

from ddlbench.counts.counts import Work
from ddlbench.errors import RunError
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.strategies import traced
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.rehearsal.rehearse import Rehearsal, Sent
from ddlbench.texts import aligned, bytes_text


def block_lines(computation: Computation, samples: int) -> Iterator[str]:
    """A table of FLOPs, bytes and arithmetic intensity of all blocks, equal neighbours together, and what limits each
    on a device (Gusak et al. 2022, table 6; the roofline of Williams et al. 2009). samples: of a micro batch"""
    speeds = computation.speeds
    ridge = None if speeds is ANY else speeds.flops_per_s / speeds.bytes_per_s
    passes = [
        (block.name, [flops_and_bytes(work, samples) for work in (block.forward, block.backward)])
        for block in computation.counts.blocks
    ]
    rows = list[tuple[str, ...]]()
    for figures, group in groupby(passes, itemgetter(1)):
        first, *others = [name for name, _ in group]
        name = f"{first} to {others[-1]}" if others else first
        for direction, (flops, moved) in zip(("forward", "backward"), figures, strict=True):
            intensity = flops / moved if moved else 0.0
            limit = "" if ridge is None else "computing" if intensity > ridge else "memory"
            rows.append((name, direction, f"{flops / 1e9:.4g}", f"{moved / 1e9:.4g}", f"{intensity:.3g}", limit))
    yield f"work of each block for {samples} samples, from the operations of the model:"
    headers = ("blocks", "pass", "GFLOP", "GB moved", "FLOP/byte", "limited by")
    yield from aligned(headers, rows, left=("blocks", "pass", "limited by"))
    if ridge is None:
        yield "the peaks of the device are not known, so what limits a block is not, either"
    else:
        yield f"above {ridge:.3g} FLOP/byte computing limits, below it the bandwidth of the memory"


def flops_and_bytes(work: Work, samples: int) -> tuple[float, float]:
    """FLOPs of one pass, and the bytes that it reads and writes."""
    return float(work.flops.sum()) * samples, float(work.moved.at(samples).sum())


@dataclass(frozen=True)
class Volume:
    """Bytes of a step along one dimension, by the equations and traced from the real framework in a rehearsal. tp: of
    all stages together; all others: of the rank that sends most.

    With parts of images sp has the halos and dp all collectives: replicas or not, gradients are sent among all ranks.
    """

    dimension: str
    traced: float
    expected: float

    @property
    def difference(self) -> float:
        """The equations' bytes minus the traced ones, relative to the traced ones."""
        return (self.expected - self.traced) / self.traced if self.traced else float(bool(self.expected))


def volume_lines(rows: Sequence[Prediction]) -> Iterator[str]:
    """For each row the messages of its equations, and the traced bytes."""
    yield "\nvolume of a step, of whole messages:"
    for row in rows:
        head = f"  {row.framework} at {row.gpus}:"
        for message in row.messages:
            yield f"{head} {message['what']}: {message['count']:g} x, {bytes_text(message['bytes_'])}"
        if not all(message["along"] for message in row.sent):
            yield f"{head} the messages are traced: it has no equations"
            continue
        try:
            for volume in compared(row, distinct_ranks(row)):
                both = f"traced {bytes_text(volume.traced)}, equations {bytes_text(volume.expected)}"
                yield f"{head} along {volume.dimension}: {both} ({volume.difference:+.1%})"
        except RunError as error:
            yield f"{head} not traced: {error}"


def distinct_ranks(row: Prediction) -> list[Rehearsal]:
    """One rank of each stage of a replica, or of each part of its images, in the layout of a prediction. RunError if it
    cannot be rehearsed."""
    assert row.config is not None
    assert row.setting is not None
    job = replace(row.setting.job, device=torch.device("cpu"))
    ranks = traced.distinct_ranks(row.gpus, row.layout)
    return [traced.rehearsed(row.config.framework, replace(job, rank=rank, local_rank=rank)) for rank in ranks]


def compared(row: Prediction, ranks: Sequence[Rehearsal]) -> list[Volume]:
    """The bytes of the equations and the traced bytes, by dimension. ranks: of `distinct_ranks`"""
    expected: dict[str, float] = {}
    for message in row.sent:
        expected[message["along"]] = expected.get(message["along"], 0.0) + message["bytes_"]
    sizes: dict[str, list[float]] = {}  # traced ones, by rank; a message counts on the rank that sends it
    for number, rank in enumerate(ranks):
        for sent in rank.collectives or ():
            if sent.kind != "recv" and sent.ranks > 1:
                sizes.setdefault(dimension_of(sent, row.layout), [0.0] * len(ranks))[number] += sent.bytes_
    return [
        Volume(name, (sum if name == "tp" else max)(sizes.get(name, [0.0])), expected.get(name, 0.0))
        for name in dict.fromkeys([*expected, *sizes])
    ]


def dimension_of(sent: Sent, layout: Mapping[str, int]) -> str:
    dp, tp, pp = (layout.get(name, 1) for name in ("dp", "tp", "pp"))
    if sent.kind == "send":
        return "sp" if "sp" in layout else "pp"
    if tp == pp == 1:  # with shards among neighbours there are two groups
        return "dp"
    group = sent.ranks, sent.stride
    if tp > 1 and group == (tp, 1):
        return "tp"
    return "dp" if dp > 1 and group == (dp, tp) else "ends"
