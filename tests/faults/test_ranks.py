"""Faults of single ranks, in every family of frameworks: what was measured before stays, no process is left, the record
says why. docs/reliability.md lists the faults and their tests."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from tests.support.faults import end, patience_s, start, start_programs
from tests.support.libraries import needs_horovod
from tests.support.processes import run
from tests.support.records import attempts_of
from tests.support.runs import record
from tests.support.waiting import WITHIN_S, wait_until

# The third step is the first one of epoch 1: epoch 0 has been recorded.
TWO_EPOCHS = ("train.steps=2", "train.epochs=3")
NAMES = ("ddp", "local_sgd", "parameter_server", "fsdp", "zero2", "tensor", "gpipe", "hybrid", "pipedream")
FAMILIES = [*NAMES, pytest.param("horovod", marks=needs_horovod)]


def options(framework: str) -> list[str]:
    """One sample a micro batch would be too few for BatchNorm where a pipeline cuts the batch by itself."""
    return ["train.global_batch=16", *["framework.tp=2"] * (framework == "hybrid")]


def require_first_epoch(folder: Path, ranks: int) -> None:
    """What was measured before the fault can be read: the epoch's line, every step of every rank, the summary."""
    (attempt,) = attempts_of(folder)
    assert attempt.notes == ()
    assert [row["epoch"] for row in attempt.epochs] == [0]
    assert attempt.record["summary"]["epochs_done"] == 1
    steps = pd.read_parquet(attempt.path / "steps.parquet")
    steps = steps[steps["complete"]]  # rank 0 also keeps those of the epoch that was interrupted
    assert steps.groupby("rank").size().to_dict() == dict.fromkeys(range(ranks), 2)
    assert not list(attempt.path.glob(".run.json*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "ranks", "on"),
    [
        *((name, 2, on) for name in NAMES for on in range(2)),
        *(pytest.param("horovod", 2, on, marks=needs_horovod) for on in range(2)),
        *(("ddp", 3, on) for on in range(3)),
    ],
)
def test_a_rank_is_killed(tmp_path: Path, framework: str, ranks: int, on: int) -> None:
    words = [*options(framework), f"train.global_batch={8 * ranks}", *TWO_EPOCHS, f"+framework.on={on}"]
    codes, said = end(start(tmp_path, "kill", *words, ranks=ranks, framework=framework))
    assert codes[on] == -signal.SIGKILL
    assert all(code not in (0, None) for code in codes), said
    content = record(tmp_path)
    assert (content["status"], content["times"]["end"] is not None) == ("error", True), said
    assert re.match(rf"rank {on}( \(.*, pid \d+\)|, which held the rendezvous store,) ended", content["reason"]), said
    require_first_epoch(tmp_path, ranks)


@needs_horovod
def test_rank_0_is_killed_while_horovod_starts(tmp_path: Path) -> None:
    """Horovod's thread then aborts the other rank, which cannot reach Horovod's server."""
    words = ["kill_in_start", "+framework.on=0"]
    codes, said = end(start(tmp_path, *words, framework="horovod"))
    assert codes[0] == -signal.SIGKILL
    content = record(tmp_path)
    assert content["status"] == "error", said
    assert content["reason"].startswith("rank 0, which held the rendezvous store, ended without a message"), said


@pytest.mark.slow
@pytest.mark.parametrize("framework", FAMILIES)
def test_a_rank_is_stopped(tmp_path: Path, framework: str) -> None:
    """The others end at the limit; the stopped one, when it goes on, too, and without a word in the record."""
    words = [*options(framework), *TWO_EPOCHS, f"train.timeout_s={patience_s()}"]
    other, stopped = start(tmp_path, "stop", *words, framework=framework)
    try:
        assert other.wait(WITHIN_S) not in (0, None)
        content = record(tmp_path)
        assert content["status"] == "timeout"
        assert "train.timeout_s" in content["reason"]
        assert "rank 1" in content["reason"], content["reason"]
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(WITHIN_S) != 0
    finally:
        for process in (other, stopped):
            process.kill()
            process.communicate()
    assert record(tmp_path) == content
    require_first_epoch(tmp_path, ranks=2)


def test_what_all_ranks_refuse_is_one_line_without_stacks(tmp_path: Path) -> None:
    """Rank 0 holds the store, and torch prints a stack for each request to a store whose process has ended."""
    codes, said = end(
        start(tmp_path, "none", "train.global_batch=12", "train.reduce_dtype=bf16", ranks=3, framework="local_sgd")
    )
    assert codes == [3, 3, 3], said
    assert "averages weights in fp32 and sends no gradients in bf16" in "".join(said)
    assert not any("TCPStore" in text for text in said), said


def test_an_allocator_that_has_no_memory_is_oom(tmp_path: Path) -> None:
    """torch's own allocator on the CPU, not a planted exception."""
    codes, said = end(start(tmp_path, "allocate", *TWO_EPOCHS))
    assert codes == [6, 7], said
    content = record(tmp_path)
    assert content["status"] == "oom"
    assert re.match(r"rank 1: RuntimeError: .*can't allocate memory", content["reason"])
    require_first_epoch(tmp_path, ranks=2)


@pytest.mark.slow
def test_a_timeout_shows_where_rank_and_loader_worker_wait(tmp_path: Path) -> None:
    words = ["loader=native", "loader.workers=1", "data.sample_train=40", "data.sample_val=20"]
    limit = f"{patience_s():g}"
    codes, said = end(start_programs(tmp_path, "hang", *words, f"train.timeout_s={limit}", ranks=1))
    assert codes == [8], said
    rank, _, worker = said[0].partition(", pid ")
    assert re.search(r"most recent call first.*failing\.py", rank, re.DOTALL)
    assert "_worker_loop" in worker
    content = record(tmp_path)
    reason = f"rank 0: no step ended within {limit} s (train.timeout_s)"
    assert (content["status"], content["reason"]) == ("timeout", reason)


@pytest.mark.slow
def test_the_workers_of_a_killed_rank_end(tmp_path: Path) -> None:
    images = ["loader=native", "loader.workers=2", "data.sample_train=40", "data.sample_val=20", "train.steps=2"]
    ranks = start_programs(tmp_path, "kill", *images, "train.epochs=3")
    workers: set[psutil.Process] = set()

    def watch() -> bool:
        for rank in ranks:
            if rank.poll() is None:
                workers.update(psutil.Process(rank.pid).children(recursive=True))
        return all(rank.poll() is not None for rank in ranks)

    wait_until(watch)
    end(ranks)
    assert len(workers) >= 2
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []
    assert record(tmp_path)["status"] == "error"


@pytest.mark.slow
def test_a_library_that_one_node_lacks_is_a_row(tmp_path: Path) -> None:
    codes, said = end(start(tmp_path, "unavailable", *TWO_EPOCHS))
    assert codes == [6, 4], said
    content = record(tmp_path)
    assert (content["status"], content["reason"]) == ("unavailable", "planted: no library on this node: install it")


@pytest.mark.slow
def test_data_that_one_node_lacks_end_both_ranks_with_a_row(tmp_path: Path) -> None:
    """Rank 1 says what is missing and never connects; rank 0 waits for it no longer than its limit."""
    codes, said = end(start(tmp_path, "none", "+data=OnOneNode", f"train.timeout_s={patience_s()}"))
    assert codes == [8, 2], said
    assert "data.root=/planted is no folder here" in said[1]
    content = record(tmp_path)
    assert content["status"] == "timeout"
    assert "could not connect" in content["reason"] or "no connection to the other ranks" in content["reason"]


@pytest.mark.slow
def test_what_a_killed_run_left_half_written_harms_no_reader(tmp_path: Path) -> None:
    """Half a line of epochs.jsonl, half a file of steps.parquet, half a run.json before its rename."""
    codes, said = end(start(tmp_path, "kill", *TWO_EPOCHS))
    assert codes[1] == -signal.SIGKILL, said
    (folder,) = tmp_path.glob("*/attempt-1")
    with (folder / "epochs.jsonl").open("a") as lines:
        lines.write('{"epoch": 1, "tra')
    (folder / ".run.json.4711").write_text('{"status": "ru')
    (attempt,) = attempts_of(tmp_path)
    assert [row["epoch"] for row in attempt.epochs] == [0]
    assert "1 line(s) of epochs.jsonl cannot be read" in " ".join(make_tables(read_all([tmp_path])).warnings)
    assert attempt.record["status"] == json.loads((folder / "run.json").read_text())["status"] == "error"


@pytest.mark.slow
def test_loader_workers_that_get_signals_as_they_start_give_their_batches() -> None:
    """They hang in no lock of another thread."""
    done = run(sys.executable, "-m", "tests.faults.starts", "--starts", "20", "--busy", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "20 starts of 2 workers" in done.stdout
