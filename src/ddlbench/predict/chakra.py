"""A predicted step as Chakra execution traces: a file for each rank, which simulators such as ASTRA-sim replay.

Sridharan et al. 2023, https://arxiv.org/abs/2305.14516; the schema is et_def.proto of MLCommons Chakra 1.0.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

from ddlbench.errors import Unsupported, UserError
from ddlbench.oracle.predictor import Prediction
from ddlbench.rehearsal.observed import Group, Operation
from ddlbench.rehearsal.rehearse import Rehearsal

# The messages and fields that are written here, with the numbers of et_def.proto. Enumerations are int32 on the wire.
SCHEMA = {
    "AttributeProto": {"name": (1, "STRING"), "int64_val": (9, "INT64"), "bool_val": (27, "BOOL"),
                       "string_val": (29, "STRING")},
    "GlobalMetadata": {"version": (1, "STRING"), "attr": (2, "MESSAGE")},
    "Node": {"id": (1, "UINT64"), "name": (2, "STRING"), "type": (3, "INT32"), "data_deps": (5, "UINT64"),
             "duration_micros": (7, "UINT64"), "attr": (10, "MESSAGE")},
}  # fmt: skip
REPEATED = ("attr", "data_deps")
FIELDS = {bool: "bool_val", int: "int64_val", str: "string_val"}  # of an attribute, by the type of its value
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # NodeType
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "reduce_scatter": 7}  # CollectiveCommType


def write(folder: Path, row: Prediction, stages: Sequence[Rehearsal], ranks: Sequence[int] | None) -> None:
    """Write FRAMEWORK_GPUS.RANK.et for ranks of a row (None: all) and FRAMEWORK_GPUS.groups.json, which has the ranks
    of every `pg_name`. UserError for a rank that does not exist and a folder that cannot be written; Unsupported for a
    collective that the schema lacks.

    stages: a rank of each pipeline stage; the others of its stage do the same in their groups
    """
    for rank in ranks or ():
        if rank >= row.gpus:
            raise UserError(f"--ranks {rank} does not exist: {row.gpus} GPUs have the ranks 0 to {row.gpus - 1}")
    classes, groups = messages(), dict[str, list[int]]()
    speed = max(sum(operation.flops for operation in stage.operations) for stage in stages) / (row.compute_s or 1.0)
    stem = f"{row.framework}_{row.gpus}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(row.gpus) if ranks is None else ranks:
            traced = stages[rank * len(stages) // row.gpus]
            with (folder / f"{stem}.{rank}.et").open("wb") as file:
                head = _attributes({"world_size": row.gpus, "rank": rank})
                proto.serialize_length_prefixed(classes["GlobalMetadata"](version="1.0.0", attr=head), file)
                for node in nodes(traced, rank, speed, groups):
                    proto.serialize_length_prefixed(classes["Node"](**node), file)
        (folder / f"{stem}.groups.json").write_text(json.dumps(groups), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --chakra FOLDER") from error


def nodes(traced: Rehearsal, rank: int, speed: float, groups: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    """The nodes of one rank: its communication, and between two of it one node with all computing.

    A node depends on the computation or collective before it, and a computation or collective on what was received
    before it. So nothing overlaps, and no message waits for another one.

    speed: FLOPs a second; groups: gets the ranks of the groups
    """
    last, received = list[int](), list[int]()
    for number, operation in enumerate(merged(traced.operations)):
        group, peer = operation.group, operation.peer
        node: dict[str, Any] = {"id": number, "name": operation.name, "data_deps": last}
        if group is not None and peer is not None:
            sends, other = group.kind == "send", peer + rank - traced.rank
            source, target = (rank, other) if sends else (other, rank)
            attr = {"comm_size": operation.bytes_, "comm_src": source, "comm_dst": target, "comm_tag": 0}
            node["type"] = SEND if sends else RECEIVE
            received = received if sends else [*received, number]
        else:
            node["data_deps"] = last + received
            last, received = [number], []
            if group is not None:
                node["type"] = COLLECTIVE
                attr = _collective(operation.bytes_, group, rank, groups)
            else:
                node |= {"type": COMPUTE, "duration_micros": round(operation.flops / speed * 1e6)}
                attr = {"num_ops": round(operation.flops), "tensor_size": operation.bytes_}
        yield node | {"attr": _attributes({"is_cpu_op": False, **attr})}


def merged(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Operations that follow each other without communication become one. Groups of one rank send nothing."""
    flops, bytes_ = 0.0, 0
    for operation in (*operations, None):
        if operation is not None and operation.group is None:
            flops, bytes_ = flops + operation.flops, bytes_ + operation.bytes_
        elif operation is None or (operation.group and operation.group.ranks > 1):
            if flops:
                yield Operation("computing", flops, bytes_)
                flops, bytes_ = 0.0, 0
            if operation is not None:
                yield operation


def _collective(bytes_: int, group: Group, rank: int, groups: dict[str, list[int]]) -> dict[str, Any]:
    """As in Chakra's own converter comm_size is what one rank gives, so a gather gives its complete message / ranks."""
    if group.kind not in COLLECTIVES:
        raise Unsupported(f"a Chakra trace cannot say {group.kind}, which is sent among {group.ranks} ranks")
    first = rank - rank // group.stride % group.ranks * group.stride
    name = f"{first}+{group.stride}x{group.ranks}"
    groups[name] = [first + index * group.stride for index in range(group.ranks)]
    size = bytes_ // group.ranks if group.kind == "all_gather" else bytes_
    return {"comm_type": COLLECTIVES[group.kind], "comm_size": size, "pg_name": name}


def messages() -> dict[str, Any]:
    """Classes of the schema's messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in SCHEMA.items():
        made = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = made.field.add(name=name, number=number, label=3 if name in REPEATED else 1)
            field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
            if kind == "MESSAGE":
                field.type_name = f".{file.package}.AttributeProto"
            if name.endswith("_val"):
                field.oneof_index = 0  # a field of a oneof is written even if it is 0 or false
    file.message_type[0].oneof_decl.add(name="value")
    classes = message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())
    return {name.rpartition(".")[2]: cls for name, cls in classes.items()}


def _attributes(values: dict[str, bool | int | str]) -> list[dict[str, Any]]:
    return [{"name": name, FIELDS[type(value)]: value} for name, value in values.items()]
