"""Loader workers that are started again and again in a process with busy threads, on a busy machine, and get the
signals of the whole job at once: does one hang or die?

    python -m tests.faults.starts --starts 200 --busy 4
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddlbench.data.feed import Request
from ddlbench.data.loaders.native import Native
from ddlbench.job import Place
from ddlbench.run.supervisor import SHOW
from tests.support.pictures import Shape, write_folders

HANGS_S = 600.0  # then the stacks are printed, and the program ends
SPIN = "while True: pass"


def hold_locks(store: dist.Store) -> None:
    """What threads of a rank do: memory, logging, the rendezvous store."""
    for number in range(sys.maxsize):
        torch.ones(1000).sum()
        logging.getLogger("starts").debug("%d", number)
        store.set("heartbeat", str(number))
        time.sleep(0.0005)


def start_and_signal(start: object, process: BaseProcess) -> None:
    start(process)  # pyright: ignore
    for number in (SHOW, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        if process.pid is not None:
            os.kill(process.pid, number)


def one_start(folder: Path, workers: int) -> float:
    """Seconds from the opening of a feed until all batches of both splits were there and the workers had ended."""
    began = time.perf_counter()
    request = Request(Shape(), Place(0, 1), torch.device("cpu"), seed=0, replica_batch=2)
    feed = Native("native", workers=workers).open(write_folders(folder, train=2, val=2), request)
    batches = len(list(feed.train(0))) + len(list(feed.validation()))
    feed.close()
    assert batches > 1, batches
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1, help="of each split")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(3):
        threading.Thread(target=hold_locks, args=(store.clone(),), daemon=True).start()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        start = BaseProcess.start
        stack.enter_context(patch.object(BaseProcess, "start", lambda process: start_and_signal(start, process)))
        for _ in range(given.busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", SPIN]).kill)
        seconds: list[float] = []
        for number in range(given.starts):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            seconds.append(one_start(folder / str(number), given.workers))
        faulthandler.cancel_dump_traceback_later()
    first, *later = seconds
    assert multiprocessing.active_children() == []
    print(f"{given.starts} starts of {2 * given.workers} workers: the first {first:.2f} s", end="")
    print(f", then {statistics.median(later):.2f} s (median), {max(later):.2f} s (longest)" if later else "")
    sys.stdout.flush()
    os._exit(0)  # the threads still run


if __name__ == "__main__":
    main()
