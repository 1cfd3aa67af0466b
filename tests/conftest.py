from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

# One rank is one device: one thread each, here and in every process that the tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# The server that forks ranks and loader workers finds tests/support/preload.py from any folder a test starts it in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
# A shell's background ignores SIGINT, nohup ignores SIGHUP, and every process that the tests start would do the same.
# A handler is not passed on.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# The same examples in every run, as long as they take on a busy machine; one failure, so that an assertion stays one.
settings.register_profile(
    "ddlbench",
    derandomize=True,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ddlbench")


# Files that take a minute or more begin first (make test keeps this order): no core waits for one of them at the end.
LONG = {
    "test_equal_training.py", "test_supervisor.py", "test_peer_failures.py", "test_rehearse.py", "test_hostile.py",
    "test_slurm.py", "test_launch.py", "test_feeding.py", "test_breaches.py", "test_command.py", "test_memory.py",
    "test_staging.py", "test_plan.py", "test_resumed_runs.py", "test_cores.py", "test_nccl.py", "test_main.py",
    "test_missing_libraries.py", "test_figures.py", "test_study.py", "test_planner.py", "test_fuzz.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from ddlbench.data.loaders import native

    native.PRELOADED += ("tests.support.preload",)  # a process has one forkserver: it serves the tests' ranks too
    torch.set_num_threads(1)
    items.sort(key=lambda item: item.path.name not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # not item.keywords, which has the names of folders
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, none is here"))


def pytest_collection_finish() -> None:
    """Every run of the program ends with a garbage collection, which need not go through modules and tests."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test writes into the environment (LOCAL_RANK, by a trainer that is not closed) reaches no other test."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def ddlbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the program with arguments, in a folder of its own and in this process; exit code and what it said."""
    import ddlbench.__main__ as program

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["ddlbench", *arguments])
        code = program.main()
        return code, capsys.readouterr().err

    return run
