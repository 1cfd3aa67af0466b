"""The step of a prediction as a timeline: all passes of a pipeline, the parts of other steps."""

from __future__ import annotations

from collections.abc import Iterator

from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.setting import Setting
from ddlbench.oracle.strategies import pipeline
from ddlbench.oracle.timing.schedule import WEIGHTS, F
from ddlbench.rehearsal.perfetto import Slice

IN_SCHEDULE = ("collectives of layers", "activations between stages")  # messages; all others follow the passes
RANK, HIDDEN = "rank 0", "hidden messages"


def parts(row: Prediction) -> Iterator[Slice]:
    """The wait for data, computing, bubble and exposed messages one after the other; hidden seconds of messages beside
    computing. row: with status ok"""
    name, now = _name(row), row.data_s or 0.0
    if now:
        yield Slice(name, RANK, "wait for data", 0.0, now)
    for message in row.messages:
        if message["hidden"]:
            yield Slice(name, HIDDEN, message["what"], now, message["hidden"], message, overlaps=True)
    lasting = [("computing", row.compute_s or 0.0), ("bubble", row.bubble_s or 0.0)]
    for what, seconds in [*lasting, *((message["what"], message["exposed"]) for message in row.messages)]:
        if seconds:
            yield Slice(name, RANK, what, now, seconds)
            now += seconds


def passes(row: Prediction, framework: Pipeline, setting: Setting) -> Iterator[Slice]:
    """The passes of every rank of a replica, with the messages between them; then reductions and update, which are the
    same on all ranks. row: with status ok"""
    name, now, ranks = _name(row), row.data_s or 0.0, row.layout["pp"]
    if now:
        yield Slice(name, RANK, "wait for data", 0.0, now)
    timed, stages = pipeline.timeline(pipeline.cut_of(framework, setting), setting)
    for kind, stage, micro, begin, end in sorted(timed, key=lambda item: item.begin):
        args, label = {"stage": stage, "micro batch": micro}, f"{kind}{micro}"
        yield Slice(name, f"rank {stage % ranks}", label, now + begin, end - begin, args)
        to = stage + 1 if kind == F else stage - 1
        seconds = stages.send[min(stage, to)] if kind != WEIGHTS and 0 <= to < len(stages.send) else 0.0
        if seconds:
            yield Slice(name, f"stage {stage} to {to}", label, now + end, seconds, args, overlaps=True)
    now += timed[-1].end
    for message in row.messages:
        if message["what"] not in IN_SCHEDULE:
            yield Slice(name, RANK, message["what"], now, message["exposed"], message)
            now += message["exposed"]
    yield Slice(name, RANK, "update", now, max(0.0, (row.step_s or 0.0) - now))


def _name(row: Prediction) -> str:
    return f"{row.framework} at {row.gpus} GPUs"
