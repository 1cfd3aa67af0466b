"""Plants breaches one by one in copies of the sources and runs the tests that must notice them.

Each breach runs in a process of its own, forked from this one. This one has imported the libraries, which takes most of
the time of a small test, and never ddlbench: so each process imports its own copy.
"""

from __future__ import annotations

import compileall
import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.breaches.breach import PACKAGE, ROOT, Breach, CannotApply

LIBRARIES = (
    "torch.distributed", "torch.profiler", "torch.utils.flop_counter", "torchvision", "pandas", "pyarrow.parquet",
    "psutil", "hydra", "omegaconf", "tqdm",
)  # fmt: skip
TEST_S = 600  # the longest a test may take, on a busy machine too
NOTICED = (AssertionError, pytest.fail.Exception)


@dataclass(frozen=True)
class Result:
    """problem: why the breach does not count as noticed; None: every test of it failed by an assertion"""

    breach: Breach
    problem: str | None
    seconds: float


class Outcomes:
    """A plugin of pytest: how each test ended, by its node id without parameters."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}  # -> "" for an assertion, else the error
        self.passed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        yield
        name = item.nodeid.partition("[")[0]
        if call.excinfo is None:
            if call.when == "call":
                self.passed.add(name)
        elif not call.excinfo.errisinstance(pytest.skip.Exception):
            said = call.excinfo.exconly()[:300]
            late = "pytest-timeout" in said
            error = "" if call.excinfo.errisinstance(NOTICED) and not late else said
            self.failed[name] = self.failed.get(name, error) and error


def problem_of(breach: Breach, outcomes: Outcomes, code: int) -> str | None:
    """None where each test of the breach failed by an assertion."""
    for test in breach.tests:
        name = test.partition("[")[0]
        if name in outcomes.failed:
            if error := outcomes.failed[name]:
                return f"{test} ends with an error, not with an assertion: {error}"
        elif name in outcomes.passed:
            return f"{test} passes"
        else:
            return f"{test} did not run (exit code {code} of pytest)"
    return None


def run_all(breaches: Sequence[Breach], folder: Path, jobs: int) -> Iterator[Result]:
    """The result of each, as it becomes known. Begins with the untouched sources, on which all tests must pass."""
    for name in LIBRARIES:
        import_module(name)
    gc.freeze()  # the processes' collections need not go through the libraries
    base = folder / "base"
    copy_sources(PACKAGE, base)
    compileall.compile_dir(base, quiet=2)
    untouched = Breach("(untouched sources)", "", "", "", "", tuple(dict.fromkeys(_tests(breaches))))
    yield from _in_turn([untouched], base, folder, 1)
    yield from _in_turn(breaches, base, folder, jobs)


def _tests(breaches: Iterable[Breach]) -> Iterator[str]:
    for breach in breaches:
        yield from breach.tests


def _in_turn(breaches: Sequence[Breach], base: Path, folder: Path, jobs: int) -> Iterator[Result]:
    waiting, running = deque(enumerate(breaches)), dict[int, tuple[Breach, Path, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, breach = waiting.popleft()
                place = folder / f"{number}-{breach.name.strip('()').replace(' ', '-')}"
                running[_fork(breach, base, place)] = breach, place, time.monotonic()
            pid, status = os.wait()
            breach, place, began = running.pop(pid)
            answer = place.with_suffix(".json")
            text = answer.read_text() if answer.exists() else ""
            problem = json.loads(text) if text else f"its process ended with {os.waitstatus_to_exitcode(status)}"
            if problem is not None and (output := place.with_suffix(".txt")).exists():
                problem += "\n" + output.read_text()[-2000:]
            shutil.rmtree(place, ignore_errors=True)
            yield Result(breach, problem, time.monotonic() - began)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def copy_sources(package: Path, place: Path) -> Path:
    """A copy of the package, beside the configuration that it reads; the package's folder."""
    shutil.copytree(package, place / "src" / "ddlbench", dirs_exist_ok=True)
    (place / "conf").symlink_to(ROOT / "conf")
    return place / "src" / "ddlbench"


def _fork(breach: Breach, base: Path, place: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        place.with_suffix(".json").write_text(json.dumps(_plant(breach, base, place)))
        code = 0
    except BaseException:
        place.with_suffix(".txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _plant(breach: Breach, base: Path, place: Path) -> str | None:
    """In a process of its own: the problem, None where the breach was noticed."""
    package = copy_sources(base / "src" / "ddlbench", place)
    if breach.file:
        try:
            breach.apply(package)
        except CannotApply as error:
            return str(error)
    sys.path[:0] = [str(place / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(place / "src"), str(ROOT)])
    os.chdir(ROOT)
    with place.with_suffix(".txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        outcomes = Outcomes()
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--timeout={TEST_S}", "--rootdir", str(ROOT)]
        # Hydra, which is imported already, brings a plugin; its assertions need not be rewritten.
        options += ["--basetemp", str(place / "tmp"), "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*options, *breach.tests], plugins=[outcomes])
        sys.stdout.flush()
    results = Path(str(import_module("ddlbench").__file__)).parent
    if results != package:
        return f"the tests imported {results}, not the copy"
    if not breach.file:
        return None if code == 0 else f"tests fail without any breach: {', '.join(outcomes.failed)}"
    return problem_of(breach, outcomes, int(code))
