"""What comes before, within and after a profiled window on a GPU, in its order: a recorded fake of torch.cuda."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddlbench.job import Place, Trainer
from ddlbench.loop import Run
from ddlbench.measure.profiling.profile import Event
from ddlbench.measure.profiling.spans import WINDOW
from ddlbench.run import scenarios as window
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.jobs import job

EVENTS = [Event(WINDOW, 0, 100), Event("gemm", 0, 60, device=True, launched=0)]


def test_a_window_has_an_idle_device_at_both_ends_and_all_ranks_begin_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps lead in; the first batch of the window is asked for within it; what is in flight between two steps is
    finished after it."""
    calls = FakeCuda(monkeypatch).calls

    @contextmanager
    def marked(name: str) -> Generator[None]:
        calls.append(f"{name} begins")
        yield
        calls.append(f"{name} ends")

    @contextmanager
    def profiler(device: object) -> Generator[Any]:
        with marked("profiler"):
            yield SimpleNamespace(events=lambda: EVENTS)

    def batches() -> Iterator[None]:
        for _ in range(9):
            calls.append("batch")
            yield None

    monkeypatch.setattr(window, "Profiler", profiler)
    monkeypatch.setattr(window, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(window, "span", lambda name: marked("window" if name == WINDOW else "data"))
    feed = SimpleNamespace(train=lambda epoch: batches(), steps_per_epoch=9)
    trainer = SimpleNamespace(step=lambda batch: calls.append("step"), flush=lambda: calls.append("flush"))
    run = SimpleNamespace(
        job=replace(job(), device=DEVICE), place=Place(0, 1), feed=feed, epochs=1,
        boundary=SimpleNamespace(heartbeat=lambda: None),
    )  # fmt: skip
    section, _ = window.profiled(cast(Run, run), cast(Trainer, trainer), {}, steps=3)
    step = ["data begins", "batch", "data ends", "step"]
    assert calls == [
        *step * 2,
        "synchronize",
        *("profiler begins", "barrier", "window begins"),
        *step * 3,
        *("synchronize", "window ends", "flush", "profiler ends"),
    ]
    assert (section["lead_in_steps"], section["events"], section["steps"]) == (2, "kernels and copies of the device", 3)
    assert section["ranks"][0]["compute_s"] == pytest.approx(60e-9)
