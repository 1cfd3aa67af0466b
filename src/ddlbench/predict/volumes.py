"""The bytes that a step sends: by the equations, and traced from the real framework in a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.oracle.predictor import Prediction
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import Rehearsal, Sent, rehearse
from ddlbench.texts import bytes_text


@dataclass(frozen=True)
class Volume:
    """Bytes of a step along one dimension. tp: of all stages together; all others: of the rank that sends most.

    With parts of images sp has the halos and dp all collectives: replicas or not, gradients are sent among all ranks.
    """

    dimension: str
    traced: float
    expected: float

    @property
    def difference(self) -> float:
        """The equations' bytes minus the traced ones, relative to the traced ones."""
        return (self.expected - self.traced) / self.traced if self.traced else float(bool(self.expected))


def lines(rows: Sequence[Prediction], config_of: Callable[[Prediction], Config]) -> Iterator[str]:
    """For each row the messages of its equations, and the traced bytes."""
    yield "\nvolume of a step, of whole messages:"
    for row in rows:
        head = f"  {row.framework} at {row.gpus}:"
        for message in row.messages:
            yield f"{head} {message['what']}: {message['count']:g} x, {bytes_text(message['bytes_'])}"
        if not all(message["along"] for message in row.sent):
            yield f"{head} the messages are traced: it has no equations"
        else:
            try:
                for volume in compared(row, distinct_ranks(config_of(row), row)):
                    both = f"traced {bytes_text(volume.traced)}, equations {bytes_text(volume.expected)}"
                    yield f"{head} along {volume.dimension}: {both} ({volume.difference:+.1%})"
            except RunError as error:
                yield f"{head} not traced: {error}"


def distinct_ranks(config: Config, row: Prediction) -> list[Rehearsal]:
    """One rank of each stage of a replica, or of each part of its images, in the layout of a prediction. RunError if it
    cannot be rehearsed."""
    parts, stages = row.layout.get("sp", 0), row.layout.get("pp", 1)
    ranks: list[Rehearsal] = []
    for rank in range(parts) if parts else range(0, row.gpus, row.gpus // stages):
        ranks.append(rehearse(config, Launch("torchrun", rank, row.gpus, rank, row.gpus), torch.device("cpu")))
        if ranks[-1].collectives is None:
            raise RunError(ranks[-1].error or "")
    return ranks


def compared(row: Prediction, ranks: Sequence[Rehearsal]) -> list[Volume]:
    """The bytes of the equations and the traced bytes, by dimension. ranks: of `distinct_ranks`"""
    expected: dict[str, float] = {}
    for message in row.sent:
        expected[message["along"]] = expected.get(message["along"], 0.0) + message["bytes_"]
    by_rank = [traced(rank.collectives or (), row.layout) for rank in ranks]
    names = dict.fromkeys([*expected, *(name for volumes in by_rank for name in volumes)])
    total = {name: [volumes.get(name, 0.0) for volumes in by_rank] for name in names}
    return [
        Volume(name, sum(total[name]) if name == "tp" else max(total[name]), expected.get(name, 0.0)) for name in names
    ]


def traced(collectives: Sequence[Sent], layout: Mapping[str, int]) -> dict[str, float]:
    """Bytes by dimension. A message counts on the rank that sends it."""
    volumes: dict[str, float] = {}
    for sent in collectives:
        if sent.kind != "recv" and sent.ranks > 1:
            dimension = dimension_of(sent, layout)
            volumes[dimension] = volumes.get(dimension, 0.0) + sent.bytes_
    return volumes


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
