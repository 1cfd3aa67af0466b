"""One attempt at a run, from the program's start to the end of its record."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ddlbench.config.compose import make_job
from ddlbench.config.keys import shown
from ddlbench.config.schema import Config
from ddlbench.cores import allowed_cores
from ddlbench.data.staging import stage
from ddlbench.errors import Failure, UserError
from ddlbench.job import Job
from ddlbench.measure.devices.environment import machine
from ddlbench.progress import Progress, tell
from ddlbench.ranks.control import all_gather, once_per_node, sum_over_ranks
from ddlbench.ranks.launch import Launch
from ddlbench.record.files import COLLECTIVES, write_json
from ddlbench.record.fingerprint import fingerprint
from ddlbench.record.record import Record, run_id
from ddlbench.record.run_json import opening
from ddlbench.texts import digest, first_few

SHOWN = 5  # differences between environments that one line names
# Ranks may have different cores, of which the record has the fewest; the other names ranks that share a GPU.
PER_RANK = ("cpu_count", "variables.NCCL_HOSTID")
LIBRARIES = ("torch", "cuda", "cudnn", "nccl")  # with the packages: all ranks must have the same versions
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo, and of NCCL where torch has it
KEPT = 4  # newest collectives of each group
ASK_S = 3.0  # longest wait for the recorder: it asks the driver of a device that may hang


class Attempt:
    """What was asked for, where it runs, and the record, which rank 0 alone has.

    The name of the record contains the hash of the data. So rank 0 first makes the data that the program makes itself
    (sample sets, indices, token files).
    """

    def __init__(self, config: Config, launch: Launch, device: torch.device, started: float = 0.0) -> None:
        """started: perf_counter as the program began"""
        self.config, self.launch, self.device = config, launch, device
        self.started = self.span_began = started
        self.spans: dict[str, float] = {}  # seconds of each part of the start, one after the other
        self.record: Record | None = None
        self.folder: Path | None = None  # of rank 0's record, on every rank
        self.hosts: list[str] = []  # of each rank
        self.hung = False  # and the last collectives of this rank are saved
        self.shown = False  # where the record is
        self.on_success: Callable[[], None] = lambda: None  # on rank 0, once `ok` is recorded

    def end_span(self, name: str) -> None:
        """A part of the start ends, and the next one begins."""
        now = time.perf_counter()
        self.spans[name], self.span_began = now - self.span_began, now

    def count_nodes(self) -> None:
        """Count the nodes once all ranks are connected: the name of the run contains their number, and launchers say
        different numbers on nodes with different numbers of ranks. Collective."""
        first_of_node = torch.tensor(int(self.launch.local_rank == 0))
        self.launch = replace(self.launch, nodes=int(sum_over_ranks(first_of_node)))

    @cached_property
    def job(self) -> Job:
        return make_job(self.config, self.launch, self.device)

    @cached_property
    def dataset(self) -> dict[str, Any]:
        """The description of the data; it exists once rank 0 has prepared them."""
        return self.config.data.describe()

    @cached_property
    def run_id(self) -> str:
        return run_id(self.config.identity(), self.launch.world_size, self.launch.nodes, str(self.dataset["hash"]))

    def open_record(self) -> None:
        if self.record is None and self.launch.rank == 0:
            self.config.data.prepare()
            content = opening(self.config, self.launch, self.device, self.dataset)
            self.record = Record.open(self.config.results_dir, self.run_id, content)
            classes, outputs = self.dataset.get("classes"), self.config.model.outputs()
            if self.config.mode == "train" and classes is not None and classes < outputs:
                tell(f"warning: the data has {classes} classes, the model {outputs}: model.num_classes={classes} fits")

    def agree(self) -> None:
        """UserError, on every rank, if one of them reads other data or has another configuration or other versions of
        libraries. Other differences between the environments are recorded and printed."""
        folder = self.record.folder.resolve() if self.record else None
        here = socket.gethostname(), self.run_id, folder, len(allowed_cores())
        hosts, run_ids, folders, cores = zip(*all_gather(here), strict=True)
        self.folder, self.hosts = folders[0], list(hosts)
        for rank, other in enumerate(run_ids):
            if other != run_ids[0]:
                raise UserError(
                    f"rank {rank} on {hosts[rank]} has the data or configuration of {other}, rank 0 on {hosts[0]} has "
                    f"those of {run_ids[0]}: give every node the same (data.root, stale file list in data.cache_dir)"
                )
        differing = compare_environments(machine(self.device))
        if self.record:
            environment = {**self.record.content["environment"], "cpu_count_min": min(cores)}
            self.record.add(ranks_differ=differing, environment=environment)
            for line in differing:
                tell(f"warning: {line}")

    def stage_data(self) -> None:
        """Copy the data to the storage of each node if data.stage_to is set."""
        data = self.config.data
        if data.stage_to is None:
            return
        progress = Progress(self.config.progress and self.launch.rank == 0)
        nodes = once_per_node(self.launch.local_rank, lambda: stage(data.files_to_stage(), progress), "ddlbench/staged")
        if self.record:
            copied = sum(node.copied_bytes for node in nodes)
            self.record.add(staging={**asdict(nodes[0]), "copied_bytes": copied, "nodes": len(nodes)})
        self.end_span("staging_s")

    def record_end(self, failure: Failure, final: bool = True) -> None:
        """Record the end, if this rank has the record; after a hang also its last collectives. Never raises."""
        record, ended_by = self.record, failure.ended_by
        if record is not None and record.finish(failure.status, failure.reason, final, ended_by=ended_by) and final:
            self._show_folder()
        if failure.status == "timeout" and ended_by is None and self.folder is not None and not self.hung:
            self.hung = True  # now: later a collective that has failed counts as ended
            save_last_collectives(self.folder, self.launch.rank)

    def record_success(self) -> bool:
        """Record the end of a complete run. False if rank 0 has not recorded `ok`; True on the other ranks."""
        if self.record is None:
            return True
        recorded = self.record.finish("ok")
        if recorded:
            self._show_folder()
            self.on_success()
        return recorded

    def _show_folder(self) -> None:
        """Print where the record is, once; not with progress=false in a run that ended with `ok`."""
        assert self.record is not None, "rank 0 has the record"
        if not self.shown and (self.config.progress or self.record.content["status"] != "ok"):
            self.shown = True
            results = shlex.quote(self.config.results_dir)
            tell(f"the record is in {self.record.folder}; to see tables: python -m ddlbench.report {results}")


def compare_environments(environment: Mapping[str, Any]) -> list[str]:
    """A line for each difference between the ranks, the same on every rank. UserError, on every rank, if two ranks have
    different versions of a library. Collective. environment: of this rank, as in run.json"""
    packages = {f"packages.{name}": version for name, version in environment["packages"].items()}
    environment_here = {k: v for k, v in (fingerprint(environment) | packages).items() if k not in PER_RANK}
    if len(set(all_gather(digest(environment_here, 64)))) == 1:  # usual: a few bytes a rank
        return []
    ranks = all_gather((socket.gethostname(), environment_here))
    hosts = [host for host, _ in ranks]
    lines: dict[str, str] = {}  # of the first rank that differs from rank 0
    for key in sorted({key for _, given in ranks for key in given}):
        values = ["none" if given.get(key) is None else given[key] for _, given in ranks]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if not differing:
            continue
        rank, name = differing[0], key.removeprefix("packages.").removeprefix("variables.")
        equal = values.count(values[rank]) - 1
        more = f" (as {equal} more)" if equal else ""
        here, of_rank_0 = shown(values[rank]), shown(values[0])
        lines[key] = f"rank {rank} on {hosts[rank]}{more} has {name} {here}, rank 0 on {hosts[0]} has {of_rank_0}"
        if others := len(differing) - 1 - equal:
            lines[key] += f"; {others} more have other values"
    conflicts = [line for key, line in lines.items() if key.startswith("packages.") or key in LIBRARIES]
    if conflicts:
        differences = "; ".join(first_few(conflicts, SHOWN, "more differences"))
        raise UserError(f"{differences}: install the same versions on every host")
    return list(lines.values())


def save_last_collectives(folder: Path, rank: int) -> None:
    """Write the last collectives of a rank that hangs into the attempt's folder; report/explain.py compares the ranks.
    Never raises and never hangs, because the process is about to end."""

    def save() -> None:
        target = folder / COLLECTIVES / f"rank-{rank}.json"
        with suppress(OSError):  # a full disk, or a folder that this node does not reach
            target.parent.mkdir(exist_ok=True)
            write_json(target, {"rank": rank, "host": socket.gethostname(), "collectives": last_collectives()})

    thread = Thread(target=save, name="ddlbench-collectives", daemon=True)
    thread.start()
    thread.join(ASK_S)


def last_collectives() -> list[dict[str, Any]]:
    """The newest collectives and messages of each process group and backend, in the order in which this rank began
    them, from torch's flight recorder, which keeps the newest 2,000 of each backend in memory (TORCH_FR_BUFFER_SIZE).
    """
    groups = defaultdict[Any, list[dict[str, Any]]](list)
    for name in DUMPS:
        dump: dict[str, Any] = json.loads(getattr(c10d, name, lambda: "{}")())
        for entry in dump.get("entries", []):
            groups[name, entry["is_p2p"], *entry["process_group"]].append(entry)
    newest = [entry for entries in groups.values() for entry in entries[-KEPT:]]
    return [
        {
            "group": " ".join(entry["process_group"]),
            # The number of the collective, or of the message, within its group.
            "sequence": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            "message": entry["is_p2p"],  # from one rank to another
            "operation": entry["profiling_name"],
            "input_sizes": entry["input_sizes"],
            "input_dtypes": entry["input_dtypes"],
            "state": entry["state"],
            "done": entry["retired"] or entry["state"] == "completed",  # whether this rank has left it
        }
        for entry in sorted(newest, key=lambda entry: entry["time_created_ns"])
    ]
