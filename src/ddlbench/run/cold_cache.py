"""train.cold_cache=true: every training epoch begins with no page of the data in the memory of any node."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ddlbench.data.feed import Dataset, Loader
from ddlbench.data.page_cache import Dropped, can_drop, drop
from ddlbench.errors import Unsupported
from ddlbench.ranks.control import all_gather, wait_for
from ddlbench.run.context import Attempt
from ddlbench.run.supervisor import Supervisor

OFF = "or set train.cold_cache=false"


def check_cold_cache(loader: Loader, data: Dataset) -> None:
    """Raise Unsupported where pages would stay in memory, or where no file is read."""
    if not can_drop():
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
    """Drops the files of both splits: local rank 0 of each node drops, all ranks wait. Every rank makes one."""

    def __init__(self, attempt: Attempt, supervisor: Supervisor) -> None:
        self.attempt, self.supervisor = attempt, supervisor
        self.dropper = attempt.launch.local_rank == 0
        self.droppers = [rank for rank, drops in enumerate(all_gather(self.dropper)) if drops]
        self.epochs = 0

    def drop(self) -> None:
        """Before an epoch's clock starts. Raises Unsupported on every rank where no page could be dropped."""
        with self.supervisor.unlimited():  # opening a million files takes its time
            here = drop(self.attempt.config.data.files_read()) if self.dropper else None
            wait_for(self.droppers, f"ddlbench/cold_cache/{self.epochs}")
            self.epochs += 1
            dropped = Dropped.total(node for node in all_gather(here) if node is not None)
        if self.attempt.record:
            facts = {**asdict(dropped), "nodes": len(self.droppers), "epochs": self.epochs}
            self.attempt.record.add(cold_cache=facts)
        if dropped.bytes and dropped.left_bytes == dropped.bytes:
            raise Unsupported(
                f"train.cold_cache=true: all {dropped.bytes} bytes of the data are still in memory, as in a file "
                f"system without a disk (tmpfs): choose another data.root or data.stage_to, {OFF}"
            )
