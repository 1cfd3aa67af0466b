"""train.cold_cache: each training epoch begins without its data in memory, on every rank, or the run is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddlbench import loop
from ddlbench.data.page_cache import Dropped, cached_bytes
from ddlbench.errors import Unsupported
from ddlbench.measure.clock import EpochClock
from ddlbench.ranks import control
from ddlbench.record.record import run_id
from ddlbench.results.tables.run_rows import run_row
from ddlbench.run import settings
from ddlbench.run.settings import check_cold_cache, drop_data
from ddlbench.run.supervisor import Supervisor
from tests.support.disk import SIZE, written
from tests.support.pictures import write_folders
from tests.support.ranks import run_ranks
from tests.support.records import attempts_of
from tests.support.runs import RESNET, composed, record
from tests.support.simulated import World

COLD = "train.cold_cache=true"
WORDS = ("+framework=ddp", "+model=resnet50", "data=imagenet", "data.root=/data", COLD)


class Kept:
    """In place of the record and the supervisor: keeps what the drop reports to them."""

    def __init__(self, local_rank: int, has_record: bool = False, files: Sequence[Path] = ()) -> None:
        self.config = SimpleNamespace(data=SimpleNamespace(files_read=lambda: files))
        self.launch = SimpleNamespace(local_rank=local_rank)
        self.record = self if has_record else None
        self.content: dict[str, Any] = {}
        self.expected: list[str] = []
        self.attempt, self.device, self.timeout_s = self, torch.device("cpu"), 60.0  # what `unlimited` needs

    def add(self, **sections: Any) -> None:
        self.content |= sections

    def expect(self, what: str) -> None:
        self.expected.append(what)

    def expect_nothing(self) -> None:
        self.expected.append("")

    unlimited = Supervisor.unlimited


def drop(kept: Kept, epoch: int) -> None:
    drop_data(cast(Any, kept), cast(Any, kept), epoch)


def check(*words: str) -> None:
    config = composed(*words)
    check_cold_cache(config.loader, config.data)


def cold_epochs(path: Path) -> list[int | None]:
    """Two epochs on this rank: bytes in memory when each begins. Rank 0, which drops them, begins last."""
    rank = int(os.environ["RANK"])
    kept, outcomes = Kept(local_rank=rank, files=[path]), list[int | None]()
    for epoch in range(2):
        if rank == 0:
            path.read_bytes()
            time.sleep(0.5)
        drop(kept, epoch)
        outcomes.append(cached_bytes(path))
        time.sleep(0.5 if rank == 0 else 0)  # the file is read again only after the other rank has looked
    assert kept.expected == ["", "no step ended"] * 2
    return outcomes


def test_every_rank_begins_after_the_drop(tmp_path: Path) -> None:
    on_disk = written(tmp_path)
    assert cached_bytes(on_disk) == SIZE
    assert run_ranks(2, cold_epochs, on_disk) == [[0, 0], [0, 0]]


NODES = (("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0))  # host and local rank
ON_NODE = {"a": Dropped(3, 100, 4), "b": Dropped(3, 500, 4), "c": Dropped(2, 60, 60)}


@pytest.mark.parametrize("left", [60, None])
def test_every_node_drops_its_own_pages_and_all_are_counted(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    """Nodes with data of their own, of which the last one has another number of ranks."""
    world, waited, dropped = World(5), list[tuple[int, ...]](), list[int]()
    world.install(monkeypatch)
    on_node = ON_NODE | {"c": replace(ON_NODE["c"], left_bytes=left)}

    def drop_node(_: object) -> Dropped:
        dropped.append(world.get_rank())
        return on_node[NODES[world.get_rank()][0]]

    monkeypatch.setattr(settings, "drop", drop_node)
    monkeypatch.setattr(control, "wait_for", lambda ranks, _: waited.append(tuple(ranks)))
    kept = [Kept(local_rank, has_record=rank == 0) for rank, (_, local_rank) in enumerate(NODES)]
    world.run(lambda rank: drop(kept[rank], 0))
    assert sorted(dropped) == [0, 2, 4]
    assert waited == [(0, 2, 4)] * 5
    facts = {"files": 8, "bytes": 660, "left_bytes": None if left is None else 68, "nodes": 3, "epochs": 1}
    assert kept[0].content == {"cold_cache": facts}


def test_what_was_dropped_is_recorded_and_nothing_dropped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(local_rank=0, has_record=True)
    monkeypatch.setattr(settings, "drop", lambda files: Dropped(3, 100, 4))
    for epoch in (3, 4):  # of an attempt that continues another one
        drop(kept, epoch)
    assert kept.content == {"cold_cache": {"files": 3, "bytes": 100, "left_bytes": 4, "nodes": 1, "epochs": 2}}
    monkeypatch.setattr(settings, "drop", lambda files: Dropped(3, 100, 100))
    with pytest.raises(Unsupported, match=r"all 100 bytes of the data are still in memory, .*tmpfs"):
        drop(kept, 5)


@pytest.mark.parametrize(("mode", "cold"), [("loader", True), ("train", True), ("loader", False)])
def test_a_run_reads_each_training_epoch_from_the_disk(
    ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, cold: bool
) -> None:
    """Nothing is in memory when the clock of an epoch begins."""
    folder = written(tmp_path).parent
    write_folders(folder / "images", train=4, val=3)
    images = sorted((folder / "images").rglob("*.JPEG"))
    stored, seen = sum(image.stat().st_size for image in images), list[int]()

    class Clock(EpochClock):
        def __init__(self, *given: Any) -> None:
            seen.append(sum(cached_bytes(image) or 0 for image in images))
            super().__init__(*given)

    monkeypatch.setattr(loop, "EpochClock", Clock)
    words = [*RESNET, "data=imagenet", f"data.root={folder}/images", "loader.workers=0", f"mode={mode}"]
    epochs = ["train.epochs=2", "train.steps=null", "train.validate=false"]
    code, said = ddlbench(*words, *epochs, f"train.cold_cache={str(cold).lower()}")
    assert code == 0, said
    assert seen == ([0, 0] if cold else [stored, stored])
    (attempt,) = attempts_of(folder / "results")
    row = run_row(attempt, [])
    expected = (stored, 0) if cold else (None, None)
    assert (row["cold_cache_bytes"], row["cold_cache_left_bytes"]) == expected
    facts = {"files": len(images), "bytes": stored, "left_bytes": 0, "nodes": 1, "epochs": 2}
    assert record(folder).get("cold_cache") == (facts if cold else None)


def test_files_of_staged_data_are_the_copies(tmp_path: Path) -> None:
    write_folders(tmp_path / "images", train=2, val=1)
    words = ("+framework=ddp", "+model=resnet50", "data=imagenet", f"data.root={tmp_path}/images")
    originals = sorted((tmp_path / "images").rglob("*.JPEG"))
    assert sorted(composed(*words).data.files_read()) == originals
    staged = composed(*words, f"data.stage_to={tmp_path}/node").data
    copies = [part.copy / name for part in staged.files_to_stage() for name in part.names]
    assert sorted(staged.files_read()) == sorted(copies) != originals


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("data=imagenet_tfrecord",), "data imagenet_tfrecord are memory-mapped .* choose data=imagenet, or set"),
        (("loader=synthetic",), "loader synthetic does not: choose loader=native, or set train.cold_cache=false"),
        (("loader=dali",), "loader dali does not: choose loader=native"),
        (("+model=gpt2_small", "data=wikitext2"), "wikitext2 are memory-mapped .* choose data.tokenize=on_the_fly"),
    ],
)
def test_what_stays_in_memory_is_refused(words: tuple[str, ...], why: str) -> None:
    others = [word for word in WORDS if word.split("=")[0] not in {own.split("=")[0] for own in words}]
    with pytest.raises(Unsupported, match=why):
        check(*others, *words)


def test_what_is_read_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check(*WORDS)
    text = ("+framework=ddp", "+model=gpt2_small", "data=wikitext2", "data.root=/data", "data.tokenize=on_the_fly")
    check(*text, COLD)
    monkeypatch.delattr(os, "posix_fadvise")
    with pytest.raises(Unsupported, match=r"train.cold_cache=true needs posix_fadvise, which \w+ lacks"):
        check(*WORDS)


def test_a_cold_epoch_is_another_measurement() -> None:
    names = [run_id(composed(*words).identity(), 4, 1, "abc") for words in (WORDS, WORDS[:-1])]
    assert names[0] != names[1]
    assert "cold_cache" not in composed(*WORDS[:-1]).identity()["train"]  # records made before have the same name
