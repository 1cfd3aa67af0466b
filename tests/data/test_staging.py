"""data.stage_to: the same samples from copies on the node, each compared with what was read before it has its name."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddlbench.config.compose import configuration
from ddlbench.data import staging
from ddlbench.data.samples import train_bpe
from ddlbench.data.staging import StagedFiles, node_folder, stage
from ddlbench.data.text.dataset import TokenText
from ddlbench.errors import UserError
from ddlbench.files import unfinished_path
from ddlbench.models import gpt2
from ddlbench.progress import Progress
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.merge import measured_options
from ddlbench.results.tables.tables import make_tables, records
from tests.support import packs
from tests.support.disk import largest_file
from tests.support.killed import ended_process
from tests.support.pictures import write_folders
from tests.support.processes import PYTHON, run
from tests.support.records import attempts_of
from tests.support.runs import GPT2, RESNET

QUIET = Progress(enabled=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folders(root: Path) -> list[str]:
    write_folders(root / "images", train=4, val=3)
    return [*RESNET, "data=imagenet", f"data.root={root}/images", "loader.workers=1"]


def shards(root: Path) -> list[str]:
    layout = write_folders(root / "images", train=4, val=3).layout()
    packs.write_pack(layout, root / "packed")
    return [*RESNET, "data=imagenet_tfrecord", f"data.root={root}/packed", "loader.workers=0"]


def text(root: Path) -> list[str]:
    folder = root / "text"
    folder.mkdir()
    (folder / "wiki.train.raw").write_text(" some words to learn , and more of them .\n" * 20)
    (folder / "wiki.valid.raw").write_text(" = A title = \n\n words .\n")
    train_bpe("", 256, folder)
    return [*GPT2, "data=wikitext2", f"data.root={folder}", "model.seq_len=16", "model.vocab_size=256"]


def raw_text(root: Path) -> list[str]:
    return [*text(root), "data.tokenize=on_the_fly"]


STAGED_FILES = {folders: 4 * 3 + 3 * 3, shards: 2 + 2, text: 2, raw_text: 2 + 2}


@pytest.mark.parametrize("data", STAGED_FILES, ids=lambda data: data.__name__)
def test_staged_data_train_the_same(ddlbench, tmp_path: Path, data: Any) -> None:
    """From the node: images that break after they were staged, of the same size and time, do no harm."""
    words = data(tmp_path)
    for attempt in ("results_dir=results", f"data.stage_to={tmp_path}/node", f"data.stage_to={tmp_path}/node"):
        code, said = ddlbench(*words, attempt)
        assert code == 0, said
        if (tmp_path / "node").exists():
            for path in (*tmp_path.glob("images/**/*.JPEG"), *tmp_path.glob("packed/*/*.tfrecord")):
                times = path.stat()
                path.write_bytes(bytes(times.st_size))
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    tables = make_tables(read_all([tmp_path / "results"]))
    plain, first, second = sorted(records(tables.runs), key=lambda row: (row["staging_s"] or 0, row["attempt"]))[:3]
    rows = {row["attempt"]: row for row in (first, second)}
    copies = contents(tmp_path / "node")
    size = sum(map(len, copies.values()))
    assert len(copies) == STAGED_FILES[data]
    assert [plain[name] for name in ("staging_s", "staged_bytes", "staged_copied_bytes")] == [None, None, None]
    assert [rows[n]["staged_bytes"] for n in (1, 2)] == [size, size]
    assert [rows[n]["staged_copied_bytes"] for n in (1, 2)] == [size, 0]
    for row in (first, second):
        for name in ("train_loss", "val_loss", "dataset_hash", "samples", "val_samples"):
            assert row[name] == plain[name], name
    assert first["run_id"] == second["run_id"] != plain["run_id"]
    (record,) = (attempt.record for attempt in attempts_of(tmp_path / "results") if attempt.record["attempt"] == 2)
    assert record["staging"]["files"] == STAGED_FILES[data]
    assert record["staging"]["nodes"] == 1
    assert "data.staged=true" in " ".join(str(row["variant"]) for row in records(tables.scaling))


def test_staging_is_part_of_the_identity_and_its_folder_is_not() -> None:
    def identity(*words: str) -> dict[str, Any]:
        return configuration(*RESNET, "data=imagenet", "data.root=/x", *words).identity()

    here, there = identity("data.stage_to=/a"), identity("data.stage_to='$B/c'")
    assert here == there
    plain = identity()
    assert (here["data"].pop("staged"), plain["data"].pop("staged")) == (True, False)
    assert here == plain
    assert measured_options({"data": {"stage_to": "/a"}, "mode": "train"}) == {"data.staged": True, "mode": "train"}
    assert measured_options({"data": None}) == {"data": None}


def part(root: Path, *names: str, size: int = 1000) -> StagedFiles:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name[:1].encode() * size)
    return StagedFiles(root, root.parent / "node" / "train", names, len(names), size * len(names))


def test_a_copy_that_was_lost_cut_or_replaced_is_made_again(tmp_path: Path) -> None:
    wanted = part(tmp_path / "data", "a/lost", "b/cut", "c/other", "d/whole")
    assert stage([wanted], QUIET).copied_bytes == 4000
    lost, cut, other, whole = (wanted.copy / name for name in wanted.names)
    lost.unlink()
    cut.write_bytes(b"b" * 500)
    other.write_bytes(b"x" * 1000)
    os.utime(other, (0, 0))
    before = whole.stat().st_ino
    assert stage([wanted], QUIET).copied_bytes == 3000
    assert contents(wanted.copy) == contents(wanted.original)
    assert whole.stat().st_ino == before


def test_a_disk_that_gives_back_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = part(tmp_path / "data", "a")
    monkeypatch.setattr(staging.os, "fsync", lambda number: os.pwrite(number, b"x", 10))
    with pytest.raises(UserError, match=r"the copy of .*data/a in .*node/train differs .*: check the disk"):
        stage([wanted], QUIET)
    assert contents(wanted.copy) == {}


def test_a_disk_that_fills_up_leaves_whole_copies_alone(tmp_path: Path) -> None:
    wanted = part(tmp_path / "data", "a", "b", size=5000)
    with largest_file(3000), pytest.raises(UserError, match=r"cannot stage .*data/. as .*node/train/. \(File too"):
        stage([wanted], QUIET)
    assert contents(wanted.copy) == {}
    assert stage([wanted], QUIET).copied_bytes == 10_000


def test_no_files_to_copy_is_an_error_of_one_line() -> None:
    with pytest.raises(UserError, match=r"the data set has no files to copy: set data\.stage_to=null"):
        stage([], QUIET)


def test_no_room_is_known_before_anything_is_copied(tmp_path: Path) -> None:
    wanted = StagedFiles(tmp_path, tmp_path / "node" / "set" / "train", ["a"], 1, bytes=10**18)
    with pytest.raises(UserError, match=r"the data are 1000000000.00 GB, .* has .* GB free: choose a larger"):
        stage([wanted], QUIET)
    assert not (tmp_path / "node").exists()


def test_an_original_that_is_gone_ends_the_run_with_its_name(ddlbench, tmp_path: Path) -> None:
    words = folders(tmp_path)
    configuration(*words).data.prepare()
    times = (tmp_path / "images/train/a").stat()
    (tmp_path / "images/train/a/002.JPEG").unlink()
    os.utime(tmp_path / "images/train/a", ns=(times.st_atime_ns, times.st_mtime_ns))  # the index does not notice
    code, said = ddlbench(*words, f"data.stage_to={tmp_path}/node")
    assert code == 2
    assert "Traceback" not in said
    assert "cannot stage" in said.splitlines()[-1]
    assert "images/train/a/002.JPEG" in said.splitlines()[-1]
    attempts = [attempt.record for attempt in attempts_of(tmp_path / "results")]
    assert ["002.JPEG" in record["reason"] for record in attempts if record["status"] == "error"] == [True]


@pytest.mark.parametrize("tokenize", ["ahead", "on_the_fly"])
def test_texts_of_one_name_stay_apart(tmp_path: Path, tokenize: str) -> None:
    """Same name and size, in folders of their own, as token files often are."""
    for split, word in (("train", "some"), ("valid", "more")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "text.txt").write_text(f" {word} words .\n" * 20)
    train_bpe("", 256, tmp_path)
    names: dict[str, Any] = {"train": "train/text.txt", "valid": "valid/text.txt"}
    plain = TokenText("text", root=str(tmp_path), tokenizer=str(tmp_path), tokenize=tokenize, **names)
    plain.prepare()
    staged = replace(plain, stage_to=str(tmp_path / "node"))
    stage(staged.files_to_stage(), QUIET)
    model = gpt2.GPT2("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=256, seq_len=16)
    for train in (True, False):
        own, original = (text.split(train, model, 0).__getitems__([(0, 3)]).inputs for text in (staged, plain))
        assert torch.equal(own, original)
    first, second = (staged.split(train, model, 0).__getitems__([(0, 3)]).inputs for train in (True, False))
    assert not torch.equal(first, second)


def test_incomplete_token_files_are_completed(ddlbench, tmp_path: Path) -> None:
    words = text(tmp_path)
    configuration(*words).data.prepare()
    for path in (tmp_path / "text").glob("wiki.valid.raw-*"):
        path.unlink()
    code, said = ddlbench(*words, f"data.stage_to={tmp_path}/node")
    assert code == 0, said


def test_several_processes_may_copy_into_one_folder(tmp_path: Path) -> None:
    wanted = part(tmp_path / "data", *(f"{n % 7}/{n}" for n in range(60)))
    with ThreadPoolExecutor(4) as pool:
        staged = list(pool.map(lambda _: stage([wanted], QUIET), range(4)))
    assert all(each.files == 60 for each in staged)
    assert contents(wanted.copy) == contents(wanted.original)
    assert list((tmp_path / "node" / ".unfinished").iterdir()) == []


def test_files_of_killed_copiers_are_removed(tmp_path: Path) -> None:
    wanted = part(tmp_path / "data", "a")
    unfinished = tmp_path / "node" / ".unfinished"
    unfinished.mkdir(parents=True)
    name, here, _, mark = unfinished_path(wanted.copy / "a", unfinished).name.split("~")
    left = {"dead": (here, ended_process().pid, 10), "old": ("node7", 1, 7200), "another's": ("node7", 2, 10)}
    for who, (place, process, age_s) in left.items():
        (path := unfinished / f"{name}~{place}~{process}~{mark}").write_text(who)
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    stage([wanted], QUIET)
    assert [path.read_text() for path in unfinished.iterdir()] == ["another's"]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = part(tmp_path / "data", "a")
    stage([wanted], QUIET)
    monkeypatch.setattr(staging.os, "getuid", lambda: 4711)
    with pytest.raises(UserError, match=r"node belongs to user \d+: set data.stage_to to a folder of your own"):
        stage([wanted], QUIET)


@pytest.mark.parametrize(("data", "within"), [(folders, "a/001.JPEG"), (shards, "00000-of-00002.tfrecord")])
def test_a_bad_image_is_named_with_its_copy(ddlbench, tmp_path: Path, data: Any, within: str) -> None:
    """The next staging would overwrite a repaired copy, and keep one that was damaged later."""
    words = [*data(tmp_path), f"data.stage_to={tmp_path}/node", "train.steps=3"]
    assert ddlbench(*words)[0] == 0
    (copy,) = tmp_path.glob(f"node/*/train/{within}")
    before, size = copy.stat(), copy.stat().st_size
    copy.write_bytes(copy.read_bytes()[:300].ljust(size, b"\0"))
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, said = ddlbench(*words)
    assert code == 2
    original = tmp_path / ("images" if data is folders else "packed") / "train" / within
    assert f"{original} (read from its copy {copy})" in said.splitlines()[-1]


def test_folder_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_HERE", "/local/7")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert node_folder("$SCRATCH_HERE/x", "set", "0123456789abcdef0") == Path("/local/7/x/set-0123456789abcdef")
    for wrong in ("$NOT_SET/x", "", "relative", "/scratch/$NOT_SET", "~no one/x"):
        with pytest.raises(UserError, match=rf"data.stage_to={re.escape(wrong)} is '.*' .* not an absolute path"):
            node_folder(wrong, "set", "0")


def test_files_are_taken_one_by_one(tmp_path: Path) -> None:
    """However many there are: neither their names nor their jobs are gathered."""
    (tmp_path / "file").write_bytes(b"1")
    names = ("file" for _ in range(5_000))  # a job that waits has more than 500 bytes
    wanted = StagedFiles(tmp_path, tmp_path / "node" / "train", names, 5_000, 5_000)
    stage([replace(wanted, names=["file"])], QUIET)
    tracemalloc.start()
    staged = stage([wanted], QUIET)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert staged.copied_bytes == 0
    assert peak < 1_000_000


@pytest.mark.slow
def test_a_node_that_cannot_stage_ends_the_others(tmp_path: Path) -> None:
    """They wait for it without a limit of time."""
    words = [word for word in folders(tmp_path) if word != "+framework=single"]
    stage_to = f"data.stage_to={tmp_path}/images/train/a/000.JPEG"  # a file: no folder can be made in it
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddlbench")
    done = run(PYTHON, *torchrun, *words, "+framework=ddp", stage_to, "mode=loader", cwd=tmp_path)
    assert done.returncode != 0
    (attempt,) = attempts_of(tmp_path / "results")
    assert attempt.record["status"] == "error"
    assert f"{tmp_path}/images/train/a/000.JPEG/imagenet-" in attempt.record["reason"]
