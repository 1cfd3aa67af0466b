"""One rank of two fails; both processes end in time, and the record says which failed first and why."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ddlbench.errors import Diverged, RunError, Unavailable, Unsupported, UserError, failure_of
from ddlbench.measure.devices.environment import variables
from ddlbench.ranks.launch import NCCL_DEFAULTS, disable_nccl_abort
from ddlbench.ranks.launchers import Launch
from ddlbench.report.explain import explain
from ddlbench.results.reading.attempts import read_all
from ddlbench.results.tables.tables import make_tables
from ddlbench.run import supervisor
from ddlbench.run.context import Attempt
from tests.support.faults import begun, end, patience_s, start
from tests.support.killed import beaten
from tests.support.libraries import needs_horovod
from tests.support.ranks import Forked
from tests.support.records import attempts_of
from tests.support.runs import record
from tests.support.waiting import wait_until

VALIDATED = "train.steps=2 train.validate=true data.val_limit=8"
OUT_OF_MEMORY = "rank 1: OutOfMemoryError: planted: out of memory"


@pytest.mark.parametrize(
    ("how", "status", "reason", "codes"),
    [
        # Rank 0 fails in its collective (an error too, of its own) or is ended by its watch.
        ("raise", "error", "rank 1: RuntimeError: planted fault", {(1, 1), (6, 1)}),
        pytest.param("memory", "oom", OUT_OF_MEMORY, {(6, 7)}, marks=pytest.mark.slow),
        # The store ends with rank 0, which stays until the other rank knows why.
        pytest.param("memory +framework.on=0", "oom", "rank 0: OutOf", {(7, 6)}, marks=pytest.mark.slow),
        ("abort +framework.after_s=1", "oom", OUT_OF_MEMORY, {(-6, 7)}),
        pytest.param("abort +framework.after_s=3", "oom", OUT_OF_MEMORY, {(-6, 7)}, marks=pytest.mark.slow),
        (f"validation {VALIDATED}", "diverged", "the validation loss is not finite", {(5, 5)}),
        pytest.param("setup", "oom", "rank 1: OutOfMemoryError: planted: too large", {(6, 7)}, marks=pytest.mark.slow),
        ("nan", "diverged", "the loss is not finite at epoch 0, step 2", {(5, 5)}),
    ],
)
def test_the_first_failure_is_the_records(tmp_path: Path, how: str, status: str, reason: str, codes: set) -> None:
    result, said = end(start(tmp_path, *how.split()))
    content = record(tmp_path)
    assert (content["status"], tuple(result)) in {(status, pair) for pair in codes}, said
    assert content["reason"].startswith(reason)
    assert content["times"]["end"] is not None
    assert "without a message" not in "".join(said)
    assert not list(tmp_path.glob("*/attempt-1/.*"))  # rank 0 wrote the end itself, and has cleared up


@pytest.mark.parametrize(
    ("framework", "how"),
    [
        ("zero2", "raise"),
        pytest.param("gpipe", "loss", marks=pytest.mark.slow),  # while the other stages wait in the schedule
        *(
            pytest.param(name, "raise", marks=pytest.mark.slow)
            for name in ("fsdp", "local_sgd", "parameter_server", "hybrid", "pipedream", "tensor", "spatial")
        ),
        pytest.param("horovod", "raise", marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_no_framework_leaves_a_rank_waiting(tmp_path: Path, framework: str, how: str) -> None:
    # One sample a micro batch would be too few for BatchNorm where a pipeline cuts the batch by itself.
    needed = {"hybrid": ["framework.tp=2"], "spatial": ["model.image_size=64"]}  # two rows in the smallest layer
    more = ["train.global_batch=16", *needed.get(framework, ())]
    codes, said = end(start(tmp_path, how, *more, framework=framework))
    assert codes in ([1, 1], [6, 1]), said
    content = record(tmp_path)
    assert (content["status"], content["reason"]) == ("error", "rank 1: RuntimeError: planted fault")


@dataclass
class Waited:
    """A run of two ranks that has ended."""

    folder: Path
    codes: list[int]
    said: list[str]


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Waited]:
    """Runs that wait for a timeout at the same time: rank 1 hangs at its third step, in closing a complete run, and in
    destroying its group of ranks.

    Where the machine is so busy that the timeout is over before that step, they have twice the time."""
    hows = {
        "step": ["hang"],
        "close": ["none", "+framework.close_hangs=true"],
        "disconnect": ["none", "+framework.disconnect_hangs=true"],
    }
    timeout_s = patience_s()
    while True:
        folders = {name: tmp_path_factory.mktemp(name) for name in hows}
        options = ("train.steps=3", f"train.timeout_s={timeout_s}")
        started = {name: start(folders[name], *words, *options) for name, words in hows.items()}
        result = {name: Waited(folders[name], *end(ranks)) for name, ranks in started.items()}
        if 'failing.py", line' in result["step"].said[1]:
            return result
        timeout_s *= 2


def test_a_rank_that_hangs_is_a_timeout(waited: dict[str, Waited]) -> None:
    hang = waited["step"]
    # Either rank may notice first; the one that sleeps ends too, with its stack.
    assert sorted(hang.codes) in ([6, 8], [8, 8]), hang.said
    content = record(hang.folder)
    assert content["status"] == "timeout"
    assert "train.timeout_s" in content["reason"]


def test_a_rank_that_hangs_is_behind_the_rank_that_waits_for_it(waited: dict[str, Waited]) -> None:
    """By the last collectives of both, in files beside the record."""
    (attempt,) = waited["step"].folder.glob("*/attempt-1")
    files = sorted(attempt.glob("collectives/rank-*.json"))
    assert [file.name for file in files] == ["rank-0.json", "rank-1.json"], waited["step"].said
    last: list[dict[str, Any]] = [json.loads(file.read_text())["collectives"][-1] for file in files]
    waiting, behind = last
    assert waiting["group"] == behind["group"]
    assert waiting["sequence"] > behind["sequence"]
    assert behind["done"]
    assert waiting["operation"] == "gloo:all_reduce"
    records = read_all([attempt])
    named = r"1 of 2 ranks behind in group .*: rank 1 on .* last began .*; rank 0 on .* last began gloo:all_reduce"
    with pytest.raises(UserError, match=named):
        explain(make_tables(records), records, str(records.folders[0]))


def hold_the_gil(limit_s: float, seconds: int, library: type[ctypes.CDLL] = ctypes.PyDLL) -> int:
    """library: PyDLL holds the lock of the interpreter during a call, CDLL releases it"""
    supervisor.FROZEN_S = limit_s
    attempt = Attempt(None, Launch("alone"), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    with supervisor.Supervisor(attempt, timeout_s=0.0):
        library(None).sleep(seconds)
    return 0


@pytest.mark.parametrize(("limit_s", "seconds", "code"), [(1.0, 600, 1), (600.0, 2, 0)])
def test_a_call_that_holds_the_gil_for_too_long_ends_the_process(limit_s: float, seconds: int, code: int) -> None:
    codes, (said,) = end([Forked(hold_the_gil, limit_s, seconds)])
    assert codes == [code], said
    assert ("Timeout (" in said and "in hold_the_gil" in said) == bool(code), said


def test_a_run_that_is_longer_than_the_limit_goes_on_while_its_interpreter_answers() -> None:
    codes, (said,) = end([Forked(hold_the_gil, 6.0, 9, ctypes.CDLL)])
    assert codes == [0], said


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1])
def test_the_other_rank_names_the_one_whose_interpreter_is_frozen(tmp_path: Path, on: int) -> None:
    codes, said = end(start(tmp_path, "freeze", f"+framework.on={on}", f"train.timeout_s={patience_s()}"))
    assert (codes[on], codes[1 - on]) == (1, 8), said
    assert re.search(r"Timeout \(.*failing\.py", said[on], re.DOTALL)
    content = record(tmp_path)
    assert content["status"] == "timeout"
    assert re.match(rf"rank {on} \(.*, pid \d+\) ended without a message, or is stopped", content["reason"])


@pytest.mark.slow
def test_the_next_reader_sees_that_a_frozen_rank_alone_has_ended(tmp_path: Path) -> None:
    codes, said = end(start(tmp_path, "freeze", f"train.timeout_s={patience_s()}", ranks=1))
    assert codes == [1], said
    assert record(tmp_path)["status"] == "running"
    beaten(next(tmp_path.glob("*/attempt-1")), 60)
    (attempt,) = attempts_of(tmp_path)
    assert attempt.record["status"] == "killed"


@pytest.mark.parametrize("place", ["close", "disconnect"])
def test_a_complete_run_is_ok_where_closing_it_hangs(waited: dict[str, Waited], place: str) -> None:
    closed = waited[place]
    assert closed.codes == [0, 0], closed.said
    assert record(closed.folder)["status"] == "ok"
    assert "rank 1: what the run had open was not closed within" in closed.said[1]


@pytest.mark.slow
def test_a_failure_is_recorded_before_anything_is_closed(tmp_path: Path) -> None:
    codes, said = end(start(tmp_path, "raise", "+framework.close_hangs=true", f"train.timeout_s={patience_s()}"))
    assert codes in ([1, 1], [6, 1]), said
    content = record(tmp_path)
    assert (content["status"], content["reason"]) == ("error", "rank 1: RuntimeError: planted fault")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_as_killed(tmp_path: Path, number: signal.Signals) -> None:
    processes = start(tmp_path, "slow", "train.steps=10000")  # they end by the signals alone
    wait_until(lambda: begun(tmp_path) and "spans" in record(tmp_path))
    time.sleep(1)  # into the first steps
    processes[0].send_signal(number)
    codes, said = end(processes)
    assert codes[0] == 128 + number, said
    assert codes[1] != 0
    content = record(tmp_path)
    assert content["status"] == "killed"
    assert number.name in content["reason"]
    stopped = re.search(r"stopped after step (\d+) of epoch 0", content["reason"])
    if stopped is not None and int(stopped[1]):  # step 0 need not have ended before the signal came
        steps = pd.read_parquet(next(tmp_path.glob("*/attempt-1/steps.parquet")))
        assert steps[["rank", "step"]].values.tolist() == [[0, step] for step in range(int(stopped[1]))]
        assert not steps["complete"].any()


def test_nccls_own_abort_is_off_before_the_group_is_made(
    ddlbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU alone; what the user has set stays; the record has what was in force."""
    import ddlbench.run.attempt as program

    seen: list[dict[str, str]] = []

    def connect(*_: object, **__: object) -> None:
        seen.append(variables(os.environ))
        raise UserError("no GPU here")

    for name in (*NCCL_DEFAULTS, "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(program, "connect", connect)
    run = ["+framework=ddp", "+model=resnet50", "loader=synthetic", "progress=false"]
    assert ddlbench(*run)[0] == 2
    monkeypatch.setattr(program, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        assert ddlbench(*run)[0] == 2
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32
    cpu, gpu = ({name: each.get(name) for name in NCCL_DEFAULTS} for each in seen)
    assert set(cpu.values()) == {None}
    assert gpu == NCCL_DEFAULTS | {"TORCH_NCCL_ENABLE_MONITORING": "1"}


ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", ASYNC: "1"}, "0"),  # torchrun's own: tests/ranks/test_launch.py
        ({"TORCHELASTIC_RUN_ID": "none", ASYNC: "3"}, "3"),
        ({ASYNC: "1"}, "1"),  # srun sets nothing: this is the user's
        ({ASYNC.removeprefix("TORCH_"): "1"}, None),  # the old name of the variable
    ],
)
def test_torchruns_own_value_is_replaced_and_a_users_stays(given: dict[str, str], left: str | None) -> None:
    disable_nccl_abort(given)
    assert given.get(ASYNC) == left


TRACEBACK = """Traceback (most recent call last):
  File "worker.py", line 358, in _worker_loop
    data = fetcher.fetch(index)
OSError: [Errno 116] Stale file handle
"""
OF_WORKER = "Caught OSError in DataLoader worker process 0. OSError: [Errno 116] Stale file handle"
ONE_VALUE = "Expected more than 1 value per channel when training"
TIMED_OUT = "Timed out waiting 5000ms for recv"


@pytest.mark.parametrize(
    ("error", "status", "reason", "code"),
    [
        (UserError("wrong value"), "error", "wrong value", 2),
        (Unsupported("cannot"), "unsupported", "cannot", 3),
        (Unavailable("no library"), "unavailable", "no library", 4),
        (Diverged("nan"), "diverged", "nan", 5),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "oom", "CUDA out of memory. Tried", 7),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom", "[enforce fail]", 7),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "[Errno 12] Cannot allocate", 7),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error", 7),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom", "CUDA error", 7),
        (
            RuntimeError("Error in GPU operator\n\nCan't allocate 8 bytes on device 0."),
            "oom",
            "Error in GPU operator",
            7,
        ),
        (OSError(f"Caught OSError in DataLoader worker process 0.\nOriginal {TRACEBACK}"), "error", OF_WORKER, 1),
        (RuntimeError("compiler raised:\n\nbecause of this"), "error", "compiler raised: because of this", 1),
        (RuntimeError(TIMED_OUT), "timeout", f"{TIMED_OUT} (the limit is train.timeout_s)", 8),
        (
            ValueError(f"{ONE_VALUE}, got"),
            "error",
            f"{ONE_VALUE}, got: BatchNorm needs more samples in a micro batch",
            1,
        ),
        (KeyError("lost"), "error", "'lost'", 1),
    ],
)
def test_what_exceptions_are_called(error: Exception, status: str, reason: str, code: int) -> None:
    failure = failure_of(error, rank=3)
    assert (failure.status, failure.exit_code) == (status, code)
    prefix = "" if isinstance(error, RunError) else f"rank 3: {type(error).__name__}: "
    assert failure.reason.startswith(prefix + reason)


@pytest.mark.parametrize(("ran_out", "status"), [(1, "oom"), (0, "error")])
@pytest.mark.parametrize("says", ["FIND was unable to find an engine", "Unable to find a valid cuDNN algorithm"])
def test_no_algorithm_for_a_convolution_is_out_of_memory_where_the_allocator_ran_out(
    monkeypatch: pytest.MonkeyPatch, says: str, ran_out: int, status: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": ran_out})
    assert failure_of(RuntimeError(f"{says} to execute this computation"), rank=0).status == status


def test_which_exceptions_another_rank_may_have_caused() -> None:
    for text in ("[gloo/transport/tcp/pair.cc] Connection closed by peer", "NCCL error: remote process exited"):
        assert failure_of(RuntimeError(text), rank=0).doubtful
    own = (RuntimeError("planted fault"), MemoryError(), Diverged("nan"), RuntimeError("DataLoader worker (pid 1)"))
    for error in own:
        assert not failure_of(error, rank=0).doubtful
