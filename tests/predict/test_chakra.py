"""Chakra traces say what the rehearsed ranks send: read back, their bytes are those of --check-volumes."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from ddlbench.errors import Unsupported
from ddlbench.oracle.predictor import Prediction
from ddlbench.predict import traces
from ddlbench.predict.__main__ import main
from ddlbench.predict.traces import compared, dimension_of, distinct_ranks
from ddlbench.rehearsal.observed import Group, Operation
from ddlbench.rehearsal.rehearse import Rehearsal, Sent
from tests.oracle.made import by_roofline
from tests.support.rehearsals import config

pytest.importorskip("google.protobuf", reason="pip install 'ddlbench[tools]'")
RANKS = 4
FRAMEWORKS = {
    "ddp": (), "fsdp": (), "zero3": (), "tensor": ("framework.tp=2", "framework.dp=2"), "gpipe": ("framework.dp=2",),
    "1f1b": ("framework.dp=1",),
}  # fmt: skip
SLOW = ("zero3", "1f1b")  # they send in the ways of fsdp and gpipe
KINDS = {number: name for name, number in traces.COLLECTIVES.items()}


def classes(official: bool) -> dict[str, Any]:
    """The message classes of MLCommons' own package, or those of ddlbench."""
    if not official:
        return traces.messages()
    try:
        return vars(importlib.import_module("chakra.schema.protobuf.et_def_pb2"))
    except ImportError:
        pytest.skip("pip install --no-deps mlc-chakra has MLCommons' own classes")


def read(file: Path, official: bool = False) -> list[dict[str, Any]]:
    """The nodes of a trace, with their attributes as a dict."""
    from google.protobuf import proto

    made, stream, nodes = classes(official), BytesIO(file.read_bytes()), list[dict[str, Any]]()
    head = proto.parse_length_prefixed(made["GlobalMetadata"], stream)
    assert head.version == "1.0.0"
    while node := proto.parse_length_prefixed(made["Node"], stream):
        attr = {item.name: getattr(item, item.WhichOneof("value")) for item in node.attr}
        fields = {"id": node.id, "type": node.type, "deps": list(node.data_deps), "us": node.duration_micros}
        nodes.append(fields | attr)
    return nodes


def bytes_by_kind(nodes: list[dict[str, Any]], groups: dict[str, list[int]], rank: int) -> dict[Group, float]:
    """The complete messages of what a rank sends, by kind and group."""
    total = defaultdict[Group, float](float)
    for node in nodes:
        if node["type"] == traces.COLLECTIVE:
            ranks, kind = groups[node["pg_name"]], KINDS[node["comm_type"]]
            assert rank in ranks
            times = len(ranks) if kind == "all_gather" else 1
            total[Group(kind, len(ranks), ranks[1] - ranks[0])] += times * node["comm_size"]
        elif node["type"] == traces.SEND:
            total[Group("send", 0, 0)] += node["comm_size"]
    return dict(total)


def traced(sent: tuple[Sent, ...]) -> dict[Group, float]:
    total = defaultdict[Group, float](float)
    for item in sent:
        if item.ranks > 1 and item.kind != "recv":
            group = Group(item.kind, item.ranks, item.stride)
            total[Group("send", 0, 0) if item.kind == "send" else group] += item.bytes_
    return dict(total)


@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FRAMEWORKS]
)
def test_the_bytes_read_back_are_those_of_check_volumes(framework: str, tmp_path: Path) -> None:
    row = by_roofline(config(framework, "gpt2_small", *FRAMEWORKS[framework]), RANKS)
    assert row.status == "ok", row.reason
    rehearsed = distinct_ranks(row)
    traces.write_row(tmp_path, row, rehearsed, traces.messages())
    groups = json.loads((tmp_path / f"{framework}_4.groups.json").read_text())
    messages, by_stage, seconds = list[tuple[int, Any]](), list[dict[str, float]](), 0.0
    for rank in range(RANKS):
        nodes = read(tmp_path / f"{framework}_4.{rank}.et")
        stage, results = rehearsed[rank * len(rehearsed) // RANKS], bytes_by_kind(nodes, groups, rank)
        assert results == traced(stage.collectives or ())
        by_dimension = defaultdict[str, float](float)
        for group, bytes_ in results.items():
            by_dimension[dimension_of(Sent(*group, 1, bytes_), row.layout)] += bytes_
        by_stage.append(dict(by_dimension))
        assert all(dep < node["id"] for node in nodes for dep in node["deps"])
        assert sum(node.get("num_ops", 0) for node in nodes) == stage.flops
        seconds = max(seconds, sum(node["us"] for node in nodes) / 1e6)
        keys = ("comm_src", "comm_dst", "comm_size")
        messages += [(node["type"], tuple(node[key] for key in keys)) for node in nodes if "comm_src" in node]
    sent, received = (Counter(what for kind, what in messages if kind == end) for end in (traces.SEND, traces.RECEIVE))
    assert sent == received
    assert bool(sent) == (row.layout.get("pp", 1) > 1)
    assert seconds == pytest.approx(row.compute_s, abs=1e-3)
    first_of_stage = by_stage[:: RANKS // len(rehearsed)]
    for volume in compared(row, rehearsed):
        volumes = [stage.get(volume.dimension, 0) for stage in first_of_stage]
        assert (sum(volumes) if volume.dimension == "tp" else max(volumes)) == volume.traced


TRACED = Rehearsal(
    "hybrid", "gpt2", 8, "cpu", 4, flops=4e9, collectives=(),
    operations=(
        Operation("aten.mm", 1e9, 100), Operation("aten.add", 0.0, 10), Operation("aten.mm", 2e9, 100),
        Operation("c10d.allgather_", 0.0, 64, Group("all_gather", 2, 2)),
        Operation("c10d.recv_", 0.0, 8, Group("recv", 2, 4), 0),
        Operation("c10d.send", 0.0, 8, Group("send", 2, 4), 0),
        Operation("c10d.allreduce_", 0.0, 32, Group("all_reduce", 1, 1)),
        Operation("aten.mm", 1e9, 100),
    ),
)  # fmt: skip


@pytest.mark.parametrize("official", [False, True])
def test_the_nodes_of_another_rank_of_the_stage(official: bool, tmp_path: Path) -> None:
    """Rank 7 of two stages of four ranks, of which rank 4 is rehearsed: its peer is 3, its group 5 and 7."""
    row = Prediction("hybrid", "gpt2", "h100", 8, "ok", "", compute_s=4.0)
    traces.write_row(tmp_path, row, [TRACED, TRACED], traces.messages())
    groups = json.loads((tmp_path / "hybrid_8.groups.json").read_text())
    assert groups == {f"{first}+2x2": [first, first + 2] for first in (0, 1, 4, 5)}
    compute, gather, receive, send, after = read(tmp_path / "hybrid_8.7.et", official)
    fields = {"id": 0, "type": 4, "deps": [], "us": 3e6}
    assert compute == fields | {"is_cpu_op": False, "num_ops": 3e9, "tensor_size": 210}
    assert gather | {"deps": [0], "comm_type": 2, "comm_size": 32, "pg_name": "5+2x2", "type": 7} == gather
    assert receive | {"deps": [1], "comm_src": 3, "comm_dst": 7, "comm_size": 8, "type": 6} == receive
    assert send | {"deps": [1], "comm_src": 7, "comm_dst": 3, "type": 5} == send
    assert (after["deps"], after["us"]) == ([1, 2], 1e6)


def test_each_of_several_steps_takes_its_seconds(tmp_path: Path) -> None:
    """With local SGD a trace has as many steps as one average of the weights needs: here two of 2 GFLOP."""
    row = Prediction("local_sgd", "gpt2", "h100", 8, "ok", "", compute_s=4.0)
    traces.write_row(tmp_path, row, [replace(TRACED, flops=2e9)], traces.messages())
    seconds = sum(node["us"] for node in read(tmp_path / "local_sgd_8.4.et")) / 1e6
    assert seconds == pytest.approx(2 * 4.0)


COMMAND = [
    "+model=gpt2_small", "model.n_layer=2", "model.n_embd=64", "model.n_head=4", "cluster=h100",
    "train.batch_per_gpu=2", "--json",
]  # fmt: skip


def test_the_command_writes_all_of_1024_ranks(tmp_path: Path) -> None:
    assert main([*COMMAND, "+framework=fsdp", "gpus=[1024]", f"--chakra={tmp_path}"]) == 0
    files = [f"fsdp_1024.{rank}.et" for rank in range(1024)]
    assert {file.name for file in tmp_path.iterdir()} == {*files, "fsdp_1024.groups.json"}
    assert json.loads((tmp_path / "fsdp_1024.groups.json").read_text()) == {"0+1x1024": list(range(1024))}
    assert read(tmp_path / files[0]) == read(tmp_path / files[-1])


def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or library that is missing ends the command."""
    words = [*COMMAND, "gpus=[2]", "+framework=ddp"]
    (tmp_path / "file").touch()
    assert main([*words, f"--chakra={tmp_path / 'file'}"]) == 2
    assert "file cannot be written (File exists): choose another --chakra FOLDER" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert main([*words, f"--chakra={tmp_path / 'new'}"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddlbench.predict: protobuf, which --chakra needs, cannot be imported (")
    assert line.endswith("): pip install 'ddlbench[tools]'")
    assert not (tmp_path / "new").exists()


def test_a_collective_without_a_name_in_the_schema_is_refused(tmp_path: Path) -> None:
    row = Prediction("ddp", "gpt2", "h100", 2, "ok", "", compute_s=4.0)
    gather = Operation("c10d.gather_", 0.0, 8, Group("gather", 2, 1))
    with pytest.raises(Unsupported, match="a Chakra trace cannot say gather, which is sent among 2 ranks"):
        traces.write_row(tmp_path, row, [replace(TRACED, operations=(TRACED.operations[0], gather))], traces.messages())
