"""A signal and the time limit stop all ranks at one boundary, and what was measured before is kept."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import end, patience_s, start, start_programs
from tests.support.ranks import Forked
from tests.support.runs import epochs, record
from tests.support.waiting import wait_until

EPOCHS = ("train.epochs=1000", "train.steps=2", "train.validate=true", "data.val_limit=8")


def stopped(
    folder: Path, act: Callable[[list[Forked]], object], *words: str, framework: str = "ddp"
) -> tuple[list[int], str]:
    """The exit codes of two ranks, and what they said; `act` comes when an epoch is recorded."""
    processes = start(folder, *words, framework=framework)
    try:
        wait_until(lambda: epochs(folder) or any(process.poll() is not None for process in processes))
        act(processes)
    finally:
        codes, said = end(processes)
    return codes, "".join(said)


@pytest.mark.parametrize(
    ("number", "framework"),
    [
        (signal.SIGUSR1, "ddp"),
        pytest.param(signal.SIGTERM, "ddp", marks=pytest.mark.slow),
        # Its ranks need not be at the same step: one that has stopped still serves the other.
        pytest.param(signal.SIGUSR1, "parameter_server", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_both_at_one_boundary(
    tmp_path: Path, number: signal.Signals, framework: str
) -> None:
    bound = ["framework.bound=3"] * (framework == "parameter_server")
    codes, said = stopped(
        tmp_path, lambda ranks: ranks[1].send_signal(number), "slow", *EPOCHS, *bound, framework=framework
    )
    assert codes == [128 + number] * 2, said
    content = record(tmp_path)
    assert content["status"] == "killed"
    assert content["ended_by"] == ("time_limit" if number == signal.SIGUSR1 else "signal")
    assert content["reason"].startswith(f"rank 1 received {number.name}")
    assert content["reason"].partition("; stopped ")[2].startswith(("after step", "before epoch", "after the last"))
    assert content["summary"]["epochs_done"] == len(epochs(tmp_path)) >= 1
    assert "a second signal ends the run at once" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("on", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_before_the_ranks_are_connected_ends_both(tmp_path: Path, on: int) -> None:
    """While it imports torch, whose threads take signals too. The other rank would wait for train.timeout_s."""
    processes = start_programs(tmp_path, "none")
    try:
        wait_until(lambda: "libtorch" in Path(f"/proc/{processes[on].pid}/maps").read_text())
        processes[on].send_signal(signal.SIGTERM)
    finally:
        codes, said = end(processes)
    assert codes[on] == 143, said
    assert codes[1 - on] in (143, 6), said
    assert f"killed: rank {on} received SIGTERM" in said[on]


@pytest.mark.slow
def test_the_time_limit_stops_all_ranks(tmp_path: Path) -> None:
    limit = round(4 * patience_s())  # beyond the start and the first epoch
    codes, said = stopped(tmp_path, lambda _: None, "slow", *EPOCHS, f"train.time_limit_s={limit}")
    assert codes == [8, 8], said
    content = record(tmp_path)
    assert content["status"] == "timeout"
    assert f"reached the time limit of {limit} s (train.time_limit_s); stopped " in content["reason"]
    assert len(epochs(tmp_path)) == content["summary"]["epochs_done"] >= 1


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_boundary(tmp_path: Path) -> None:
    def twice(ranks: list[Forked]) -> None:
        time.sleep(2)  # into the step that does not end
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        time.sleep(2)  # ONE_SIGNAL_S
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)

    # Rank 1 hangs at its third step, which is the first of epoch 1.
    codes, said = stopped(tmp_path, twice, "hang", *EPOCHS)
    assert codes == [143, 143], said
    assert record(tmp_path)["status"] == "killed"
    assert len(epochs(tmp_path)) == 1


@pytest.mark.slow
def test_a_rank_that_hangs_does_not_hold_up_a_signal(tmp_path: Path) -> None:
    codes, said = stopped(tmp_path, lambda ranks: ranks[0].send_signal(signal.SIGTERM), "hang", *EPOCHS)
    assert codes == [143, 143], said
    assert record(tmp_path)["status"] == "killed"
    assert len(epochs(tmp_path)) == 1
