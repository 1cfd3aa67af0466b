"""train.cold_cache=true: every training epoch begins with no page of the data in the memory of any node."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ddlbench.config.schema import Config
from ddlbench.data.page_cache import Dropped, can_drop, drop
from ddlbench.errors import Unsupported
from ddlbench.ranks.control import all_gather, wait_for
from ddlbench.run.context import Records
from ddlbench.run.supervisor import Supervisor

OFF = "or set train.cold_cache=false"


def check_cold_cache(config: Config) -> None:
    """Raise Unsupported where pages would stay in memory, or where no file is read."""
    if not config.train.cold_cache:
        return
    if not can_drop():
        raise Unsupported(f"train.cold_cache=true needs posix_fadvise, which {sys.platform} lacks: use Linux, {OFF}")
    if not config.loader.drops_cache:
        raise Unsupported(
            f"train.cold_cache=true needs a loader that reads files and maps none, loader {config.loader.name} does "
            f"not: choose loader=native, {OFF}"
        )
    if config.data.mapped:
        remedy = "data.tokenize=on_the_fly" if config.data.kind == "text" else "data=imagenet"
        raise Unsupported(
            f"train.cold_cache=true needs files that are read, data {config.data.name} are memory-mapped and mapped "
            f"pages cannot be dropped: choose {remedy}, {OFF}"
        )


class ColdCache:
    """Drops the files of both splits: local rank 0 of each node drops, all ranks wait. Every rank makes one."""

    def __init__(self, config: Config, records: Records, supervisor: Supervisor) -> None:
        self.config, self.records, self.supervisor = config, records, supervisor
        self.dropper = records.launch.local_rank == 0
        self.droppers = [rank for rank, drops in enumerate(all_gather(self.dropper)) if drops]
        self.epochs = 0

    def drop(self) -> None:
        """Before an epoch's clock starts. Raises Unsupported on every rank where no page could be dropped."""
        with self.supervisor.unlimited():  # opening a million files takes its time
            own = drop(self.config.data.files_read()) if self.dropper else None
            wait_for(self.droppers, f"ddlbench/cold_cache/{self.epochs}")
            self.epochs += 1
            dropped = Dropped.total(each for each in all_gather(own) if each is not None)
        if self.records.record:
            facts = {**asdict(dropped), "nodes": len(self.droppers), "epochs": self.epochs}
            self.records.record.add(cold_cache=facts)
        if dropped.bytes and dropped.left_bytes == dropped.bytes:
            raise Unsupported(
                f"train.cold_cache=true: all {dropped.bytes} bytes of the data are still in memory, as in a file "
                f"system without a disk (tmpfs): choose another data.root or data.stage_to, {OFF}"
            )
