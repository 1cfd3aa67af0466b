"""train.cold_cache=true: every training epoch begins with no page of the data in the memory of any node."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

from ddlbench.data.feed import Dataset, Loader
from ddlbench.data.page_cache import Dropped, drop
from ddlbench.errors import Unsupported
from ddlbench.ranks.control import once_per_node
from ddlbench.run.context import Attempt
from ddlbench.run.supervisor import Supervisor

OFF = "or set train.cold_cache=false"


def check_cold_cache(loader: Loader, data: Dataset) -> None:
    """Raise Unsupported where pages would stay in memory, or where no file is read."""
    if not hasattr(os, "posix_fadvise"):
        raise Unsupported(f"train.cold_cache=true needs posix_fadvise, which {sys.platform} lacks: use Linux, {OFF}")
    if not loader.drops_cache:
        raise Unsupported(
            f"train.cold_cache=true needs a loader that reads files and maps none, loader {loader.name} does "
            f"not: choose loader=native, {OFF}"
        )
    if data.mapped:
        remedy = "data.tokenize=on_the_fly" if data.kind == "text" else "data=imagenet"
        raise Unsupported(
            f"train.cold_cache=true needs files that are read, data {data.name} are memory-mapped and mapped "
            f"pages cannot be dropped: choose {remedy}, {OFF}"
        )


class ColdCache:
    """Drops the files of both splits on every node. Every rank makes one."""

    def __init__(self, attempt: Attempt, supervisor: Supervisor) -> None:
        self.attempt, self.supervisor, self.epochs = attempt, supervisor, 0

    def drop(self) -> None:
        """Called before an epoch's clock starts. Unsupported, on every rank, where no page could be dropped."""
        data, local_rank = self.attempt.config.data, self.attempt.launch.local_rank
        with self.supervisor.unlimited():  # opening a million files takes its time
            nodes = once_per_node(local_rank, lambda: drop(data.files_read()), f"ddlbench/cold_cache/{self.epochs}")
        self.epochs += 1
        dropped = Dropped.total(nodes)
        if self.attempt.record:
            facts = {**asdict(dropped), "nodes": len(nodes), "epochs": self.epochs}
            self.attempt.record.add(cold_cache=facts)
        if dropped.bytes and dropped.left_bytes == dropped.bytes:
            raise Unsupported(
                f"train.cold_cache=true: all {dropped.bytes} bytes of the data are still in memory, as in a file "
                f"system without a disk (tmpfs): choose another data.root or data.stage_to, {OFF}"
            )
