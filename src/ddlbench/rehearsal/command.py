"""mode=rehearsal: rehearse one rank of a job and print the result. Nothing is measured, so nothing is recorded."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.ranks.launch import Launch
from ddlbench.rehearsal.rehearse import Rehearsal, rehearse
from ddlbench.texts import bytes_text

ON_CPU = (
    "on the CPU this includes numbers that stay on the host where the device is a GPU, such as step counters and seeds"
)


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
    print(json.dumps(asdict(row), indent=1) if asked.json else text(row))
    return 0 if row.error is None else 1


def text(row: Rehearsal) -> str:
    where = ", ".join(f"{name} {index}" for name, index in row.coordinates.items())
    lines = [
        f"{row.framework}, {row.model}: rank {row.rank} of {row.gpus} on {row.device}"
        + (f" ({where})" if where else "")
    ]
    for name, bytes_ in (row.memory or {}).items():
        lines.append(f"memory: {name}: {'not known' if bytes_ is None else bytes_text(bytes_)}")
    for sent in row.collectives or ():
        among = f"{sent.ranks} ranks, {sent.stride} apart"
        lines.append(
            f"collective of a step: {sent.kind} among {among}: {sent.count:g} x, {bytes_text(sent.bytes_)} altogether"
        )
    lines += [f"the host waits in a step: {call}: {count:g} x" for call, count in (row.host_waits or {}).items()]
    lines += [ON_CPU] if row.host_waits and row.device == "cpu" else []
    lines += [f"does not fit together: {row.error}"] if row.error else []
    return "\n".join(lines)
