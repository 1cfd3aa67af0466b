"""The step of a prediction as a timeline: all passes of a pipeline, the parts of other steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.strategies import pipeline
from ddlbench.oracle.timing.schedule import WEIGHTS, F
from ddlbench.rehearsal.rehearse import Slice

IN_SCHEDULE = ("collectives of layers", "activations between stages")  # messages of a pipeline beside its passes
RANK, HIDDEN = "rank 0", "hidden messages"


def timeline(row: Prediction) -> Iterator[Slice]:
    """The wait for data; computing and bubble, or the passes of every rank of a replica; then exposed messages, which
    are the same on all ranks, one after the other. What they hide is beside computing. row: with status ok"""
    passes, send = (), ()  # seconds of a message from each stage to the next
    if row.config and row.setting and isinstance(row.config.framework, Pipeline):
        passes, send = pipeline.timeline(row.config.framework, row.setting)
    made, now = partial(Slice, f"{row.framework} at {row.gpus} GPUs"), row.data_s or 0.0
    yield made(RANK, "wait for data", 0.0, now)
    messages = [message for message in row.messages if not passes or message["what"] not in IN_SCHEDULE]
    for message in messages:
        yield made(HIDDEN, message["what"], now, message["hidden"], message, overlaps=True)
    for kind, stage, micro, begin, end, rank in passes:
        args, name = {"stage": stage, "micro batch": micro}, f"{kind}{micro}"
        yield made(f"rank {rank}", name, now + begin, end - begin, args)
        to = stage + 1 if kind == F else stage - 1
        if kind != WEIGHTS and 0 <= to < len(send):
            yield made(f"stage {stage} to {to}", name, now + end, send[min(stage, to)], args, overlaps=True)
    parts = [(message["what"], message["exposed"]) for message in messages]
    rest = row.unexplained_s or 0.0
    if passes:
        now += passes[-1].end
        update = (row.step_s or 0.0) - rest - now - sum(seconds for _, seconds in parts)
        parts.append(("update of weights", update))
    else:
        parts = [("computing", row.compute_s or 0.0), ("bubble", row.bubble_s or 0.0), *parts]
    for what, seconds in [*parts, ("not explained by the model", rest)]:
        yield made(RANK, what, now, max(0.0, seconds))
        now += seconds
