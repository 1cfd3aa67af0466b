"""What a predicted step sends, beside what its ranks send in a rehearsal (`--check-volumes`); the step as a timeline
(`--timeline`), and as Chakra execution traces (`--chakra`): a file for each rank, which simulators such as ASTRA-sim
replay.

Sridharan et al. 2023, https://arxiv.org/abs/2305.14516; the schema is et_def.proto of MLCommons Chakra 1.0.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from ddlbench.errors import RunError, Unsupported, importing, reporting
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.oracle.predictor import Prediction
from ddlbench.oracle.strategies import pipeline, traced
from ddlbench.oracle.timing.schedule import WEIGHTS, F
from ddlbench.rehearsal.observed import Operation
from ddlbench.rehearsal.rehearse import Rehearsal, Sent, Slice
from ddlbench.texts import bytes_text, counted

IN_SCHEDULE = ("collectives of layers", "activations between stages")  # messages of a pipeline beside its passes
RANK, HIDDEN = "rank 0", "hidden messages"

# The part of Chakra's schema that is written, with the numbers of et_def.proto. Enumerations are int32 in the file.
SCHEMA = """
name: "et_def.proto" package: "ChakraProtoMsg" syntax: "proto3"
message_type { name: "AttributeProto" oneof_decl { name: "value" }
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "int64_val" number: 9 type: TYPE_INT64 oneof_index: 0 }
  field { name: "bool_val" number: 27 type: TYPE_BOOL oneof_index: 0 }
  field { name: "string_val" number: 29 type: TYPE_STRING oneof_index: 0 } }
message_type { name: "GlobalMetadata"
  field { name: "version" number: 1 type: TYPE_STRING }
  field { name: "attr" number: 2 type: TYPE_MESSAGE label: LABEL_REPEATED type_name: "AttributeProto" } }
message_type { name: "Node"
  field { name: "id" number: 1 type: TYPE_UINT64 }
  field { name: "name" number: 2 type: TYPE_STRING }
  field { name: "type" number: 3 type: TYPE_INT32 }
  field { name: "data_deps" number: 5 type: TYPE_UINT64 label: LABEL_REPEATED }
  field { name: "duration_micros" number: 7 type: TYPE_UINT64 }
  field { name: "attr" number: 10 type: TYPE_MESSAGE label: LABEL_REPEATED type_name: "AttributeProto" } }
"""
FIELDS = {bool: "bool_val", int: "int64_val", str: "string_val"}  # of an attribute, by the type of its value
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # NodeType
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "reduce_scatter": 7}  # CollectiveCommType


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
    job, ranks = row.setting.job, traced.distinct_ranks(row.gpus, row.layout)
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


def timeline(row: Prediction) -> Iterator[Slice]:
    """The wait for data; computing and bubble, or the passes of every rank of a replica; then exposed messages, which
    are the same on all ranks, one after the other. Hidden messages are beside computing. row: with status ok"""
    passes, send = (), ()  # seconds of a message from each stage to the next
    if row.config and row.setting and isinstance(row.config.framework, Pipeline):
        passes, send = pipeline.timeline(row.config.framework, row.setting)
    made, now = partial(Slice, f"{row.framework} at {counted(row.gpus, 'GPU')}"), row.data_s or 0.0
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


def write_chakra(folder: Path, rows: Sequence[Prediction]) -> Iterator[str]:
    """Write the traces of rows. Yields a line for a row that has none. UserError for a folder that cannot be written;
    Unavailable without protobuf.

    rows: with status ok
    """
    classes = messages()
    with reporting(f"{folder} cannot be written", "choose another --chakra FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        for row in rows:
            try:
                write_row(folder, row, distinct_ranks(row), classes)
            except RunError as error:
                yield f"no Chakra trace of {row.framework} at {row.gpus}: {error}"


def write_row(folder: Path, row: Prediction, stages: Sequence[Rehearsal], classes: dict[str, Any]) -> None:
    """FRAMEWORK_GPUS.RANK.et for each rank, and FRAMEWORK_GPUS.groups.json with the ranks of every `pg_name`.
    Unsupported for a collective that the schema lacks.

    stages: a rank of each pipeline stage, or of each part of the images; the others do the same in their groups
    """
    from google.protobuf.proto import serialize_length_prefixed

    stem, groups = f"{row.framework}_{row.gpus}", dict[str, list[int]]()
    steps = [replace(stage, operations=tuple(merged(stage.operations))) for stage in stages]
    speed = max(step.flops or 0.0 for step in steps) / (row.compute_s or 1.0)  # a trace may have several steps
    for rank in range(row.gpus):
        index = rank % len(steps) if "sp" in row.layout else rank * len(steps) // row.gpus
        head: dict[str, Any] = {"version": "1.0.0", "attr": {"world_size": row.gpus, "rank": rank}}
        written = [("GlobalMetadata", head), *(("Node", node) for node in nodes(steps[index], rank, speed, groups))]
        file = BytesIO()
        for kind, values in written:
            attr = [{"name": name, FIELDS[type(value)]: value} for name, value in values["attr"].items()]
            serialize_length_prefixed(classes[kind](**{**values, "attr": attr}), file)
        (folder / f"{stem}.{rank}.et").write_bytes(file.getvalue())
    (folder / f"{stem}.groups.json").write_text(json.dumps(groups), encoding="utf-8")


def nodes(step: Rehearsal, rank: int, speed: float, groups: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """The nodes of one rank, with their attributes by name. A node depends on the computation or collective before it,
    and a computation or collective on what was received before it. So nothing overlaps, and no message waits for
    another one.

    speed: FLOPs a second; groups: gets the ranks of the groups
    """
    last, received = list[int](), list[int]()
    for number, (name, flops, bytes_, group, peer) in enumerate(step.operations):
        attr: dict[str, Any]
        if group is None:
            kind, attr = COMPUTE, {"num_ops": round(flops), "tensor_size": bytes_}
        elif peer is not None:
            kind, other = SEND if group.kind == "send" else RECEIVE, peer + rank - step.rank
            source, target = (rank, other) if kind == SEND else (other, rank)
            attr = {"comm_size": bytes_, "comm_tag": 0, "comm_src": source, "comm_dst": target}
        elif group.kind in COLLECTIVES:
            first = rank - rank // group.stride % group.ranks * group.stride
            pg_name = f"{first}+{group.stride}x{group.ranks}"
            groups[pg_name] = [first + index * group.stride for index in range(group.ranks)]
            # As in Chakra's own converter this is what one rank gives, so a gather gives its complete message / ranks.
            size = bytes_ // group.ranks if group.kind == "all_gather" else bytes_
            kind, attr = COLLECTIVE, {"comm_type": COLLECTIVES[group.kind], "comm_size": size, "pg_name": pg_name}
        else:
            raise Unsupported(f"a Chakra trace cannot say {group.kind}, which is sent among {group.ranks} ranks")
        yield {
            "id": number,
            "name": name,
            "type": kind,
            "attr": {"is_cpu_op": False, **attr},
            "data_deps": last if kind in (SEND, RECEIVE) else last + received,
            "duration_micros": round(flops / speed * 1e6),
        }
        if kind == RECEIVE:
            received.append(number)
        elif kind != SEND:
            last, received = [number], []


def merged(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Computing between two messages is one operation. Operations without FLOPs and groups of one rank are
    left out."""
    kept = (operation for operation in operations if operation.group is None or operation.group.ranks > 1)
    for group, run in groupby(kept, key=lambda operation: operation.group):
        together = list(run)
        if group is not None:
            yield from together
        elif flops := sum(operation.flops for operation in together):
            yield Operation("computing", flops, sum(operation.bytes_ for operation in together))


def messages() -> dict[str, Any]:
    """Classes of the schema's messages, by name. Unavailable without protobuf."""
    with importing("protobuf, which --chakra needs,", "pip install 'ddlbench[tools]'"):
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
    file = text_format.Parse(SCHEMA, descriptor_pb2.FileDescriptorProto())
    classes = message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())
    return {name.rpartition(".")[2]: made for name, made in classes.items()}
