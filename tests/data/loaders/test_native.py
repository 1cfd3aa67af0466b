"""The DataLoader behind the feed: which rank sees which sample, with any number of workers, and what happens when
one fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import torch

from ddlbench.data.feed import Fetched
from ddlbench.data.images.folders import ImageSplit
from ddlbench.data.loaders import native
from ddlbench.data.loaders.native import Native
from ddlbench.data.loaders.replica_feed import epoch_order
from ddlbench.errors import UserError
from tests.support.dali_feeds import request
from tests.support.faults import end
from tests.support.pictures import Shape, truncate, write_folders
from tests.support.ranks import Forked
from tests.support.tiny import TinyData

LOCK = threading.Lock()


def one_thread():
    assert torch.get_num_threads() == 1


def send_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)


def take_lock():
    with LOCK:
        pass


def fail():
    raise ZeroDivisionError


@dataclass
class KeySplit:
    """A sample is its own key, so that a batch shows which samples it holds. probe: called where a batch is read"""

    samples: int
    probe: Callable[[], object]

    def __len__(self):
        return self.samples

    def __getitems__(self, keys):
        self.probe()
        inputs = torch.tensor(keys, dtype=torch.long).reshape(-1, 2)
        return Fetched(inputs, inputs[:, 1].clone(), torch.ones(len(keys), dtype=torch.bool))


@dataclass
class KeyData(TinyData):
    train_samples: int = 26
    val_samples: int = 7
    kind: str = "text"
    probe: Callable[[], object] = int

    def split(self, train, model, seed) -> Any:
        return KeySplit(self.train_samples if train else self.val_samples, self.probe)


def opened(data, *args, workers=0, persistent=True, **fields):
    loader = Native("native", workers=workers, persistent=persistent)
    return loader.open(data, request(*args, **fields))


def keys(batches):
    """[[(epoch, index), ...] a batch] of the valid samples."""
    return [[tuple(key) for key in batch.inputs[batch.valid].tolist()] for batch in batches]


def everything(feed, epochs=(0, 1)):
    batches = [batch for epoch in epochs for batch in feed.train(epoch)] + list(feed.validation())
    feed.close()
    return [torch.cat([getattr(batch, part) for batch in batches]) for part in ("inputs", "targets", "valid")]


def test_samples_are_asked_for_by_epoch_and_index():
    feed = opened(KeyData())
    for epoch in (3, 3, 4):
        order = epoch_order(26, seed=0, epoch=epoch)[:24].reshape(6, 4).tolist()
        assert keys(feed.train(epoch)) == [[(epoch, index) for index in batch] for batch in order]
    first, last = feed.validation()
    assert keys([first]) == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
    assert last.inputs.tolist() == [[0, 4], [0, 5], [0, 6], [0, 0]]
    assert last.valid.tolist() == [True, True, True, False]


def test_steps_are_capped():
    feed = opened(KeyData(), steps=2)
    assert (feed.steps_per_epoch, feed.dropped_samples) == (2, 2)
    assert keys(feed.train(0)) == keys(opened(KeyData()).train(0))[:2]


def test_workers_change_no_byte(folders):
    alone = everything(opened(folders))
    for persistent in (True, False):
        for expected, got in zip(alone, everything(opened(folders, workers=2, persistent=persistent)), strict=True):
            assert torch.equal(expected, got)


def test_persistent_workers_stay_and_close_ends_them_at_once(monkeypatch):
    # For so long DataLoader would wait for a worker that does not answer.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 120.0)
    feed = opened(KeyData(), workers=2)
    assert multiprocessing.active_children() == []
    batches = feed.train(0)
    next(batches)
    first = {child.pid for child in multiprocessing.active_children()}
    assert len(first) == 2
    assert len(list(batches)) == 5
    second = feed.train(1)  # left in the middle, as an error would leave it
    assert keys([next(second)]) == keys(opened(KeyData()).train(1))[:1]
    assert {child.pid for child in multiprocessing.active_children()} == first
    assert keys(feed.train(2)) == keys(opened(KeyData()).train(2))
    next(feed.train(3))
    began = time.perf_counter()
    feed.close()
    assert time.perf_counter() - began < 100
    assert multiprocessing.active_children() == []
    feed.close()


def test_workers_have_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    feed = opened(KeyData(probe=one_thread), workers=1)
    try:
        assert len(list(feed.train(0))) == 6
    finally:
        feed.close()
        torch.set_num_threads(threads)


def test_signals_to_the_job_neither_stop_workers_nor_run_the_ranks_handlers():
    ran = []
    before = signal.signal(signal.SIGUSR1, lambda *_: ran.append(os.getpid()))
    feed = opened(KeyData(probe=send_signals), workers=1)
    try:
        assert len(list(feed.train(0))) == 6
        (worker,) = multiprocessing.active_children()
    finally:
        signal.signal(signal.SIGUSR1, before)
        feed.close()
    assert ran == []
    assert worker.exitcode == 0


@pytest.mark.slow
def test_a_worker_that_does_not_end_by_itself_ends_some_time_after_sigterm():
    feed = opened(KeyData(), workers=1)
    list(feed.train(0))
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(native.TERM_S / 2)
    assert worker.exitcode is None
    worker.join(native.TERM_S)
    assert worker.exitcode == -signal.SIGALRM
    feed.close()


def test_the_server_imports_what_a_worker_reads_images_with(folders, monkeypatch):
    """Else each worker would import torchvision, which takes seconds."""
    asked = []
    monkeypatch.setattr(native, "start_server", lambda *modules: asked.extend(modules))
    opened(folders, workers=1).close()
    assert any(module.startswith("torchvision.transforms.v2") for module in asked)
    assert ImageSplit.__module__ in asked


def test_a_lock_that_a_thread_of_the_rank_holds_stops_no_worker():
    """A fork of the rank would copy it, and nobody would release it."""
    with LOCK:
        feed = opened(KeyData(probe=take_lock), workers=1)
        assert len(list(feed.train(0))) == 6
        feed.close()


def killed_rank(told):
    feed = opened(KeyData(), workers=1)
    next(feed.train(0))
    (worker,) = multiprocessing.active_children()
    told.write_text(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0  # not reached


def test_workers_die_with_a_killed_rank(tmp_path):
    (code,), said = end([Forked(killed_rank, tmp_path / "worker")])
    assert code == -signal.SIGKILL, said
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 3  # a DataLoader worker by itself looks every 5 s
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker)


def test_a_worker_that_breaks_its_connection_as_it_is_killed_is_named(monkeypatch):
    """DataLoader passes on the error of the connection if it does not see yet that the worker has ended."""
    feed = opened(KeyData(), workers=1)

    def broken(iterator, timeout=None):
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_try_get_data", broken)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        list(feed.train(0))
    feed.close()


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("workers", "decode"), [(0, "pil"), (2, "torchvision")])
def test_bad_file_ends_the_run_with_one_line(tmp_path, workers, decode):
    data = replace(write_folders(tmp_path, train=5, val=3), decode=decode)
    truncate(tmp_path / "val/b/001.JPEG")
    feed = opened(data, workers=workers)
    assert len(list(feed.train(0))) == 3
    with pytest.raises(UserError, match=r"val/b/001.JPEG cannot be decoded") as error:
        list(feed.validation())
    assert "\n" not in str(error.value)
    feed.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("workers", "decode"), [(0, "pil"), (2, "torchvision")])
def test_skipped_files_are_counted_and_named_once(tmp_path, workers, decode, caplog):
    data = replace(write_folders(tmp_path, train=5, val=3), decode=decode, on_bad_sample="skip")
    truncate(tmp_path / "train/a/002.JPEG")
    (tmp_path / "val/b/001.JPEG").write_text("no image")
    feed = opened(data, workers=workers, replica_batch=5)
    with caplog.at_level(logging.WARNING):
        _, _, valid = everything(feed, epochs=(0, 1))
    assert valid.tolist() == [True] * 30 + [True] * 4 + [False] + [True] * 4 + [False]  # the last one is padding
    assert feed.facts()["bad_samples"] == {"train/a/002.JPEG": 2, "val/b/001.JPEG": 1}
    assert [record.message for record in caplog.records] == [
        "bad sample: train/a/002.JPEG cannot be decoded",
        "bad sample: val/b/001.JPEG cannot be decoded",
    ]


def test_errors_of_the_program_keep_their_traceback():
    feed = opened(KeyData(probe=fail), workers=1)
    with pytest.raises(ZeroDivisionError, match="worker process 0"):
        list(feed.train(0))
    feed.close()


def test_workers_follow_the_kind_of_data(folders):
    loader = Native("native")
    assert loader.open(folders, request(cores=3)).facts() == {
        "workers": 2, "prefetch": 2, "pin_memory": False, "persistent": True, "ahead": 4, "cores": 3, "bad_samples": {},
    }  # fmt: skip
    in_the_rank = loader.open(KeyData(), request(cores=3)).facts()
    assert (in_the_rank["workers"], in_the_rank["ahead"]) == (0, 0)
    assert Native("native", workers=1).open(folders, request(cores=3)).facts()["workers"] == 1
    loader.check(folders, Shape(), torch.device("cpu"))


@pytest.mark.gpu
def test_batches_are_pinned_and_moved(folders):
    device = torch.device("cuda")
    feed = Native("native", workers=1).open(folders, replace(request(), device=device))
    assert feed.facts()["pin_memory"] is True
    (batch, *_) = list(feed.train(0))
    feed.close()
    assert {part.device.type for part in (batch.inputs, batch.targets, batch.valid)} == {"cuda"}
    (expected, *_) = opened(folders).train(0)
    assert torch.equal(batch.inputs.cpu(), expected.inputs)
