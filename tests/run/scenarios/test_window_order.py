"""What comes before, within and after a profiled window, in its order; on a GPU with a recorded fake of torch.cuda."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddlbench.config.schema import Config
from ddlbench.errors import RunError
from ddlbench.job import Place, Trainer
from ddlbench.loop import Run
from ddlbench.measure.profiling.profile import Event
from ddlbench.measure.profiling.spans import WINDOW
from ddlbench.recipe.recipe import Rates
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


def test_an_error_of_a_window_follows_the_record_of_it_and_of_the_measured_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The facts of the framework are those of the measured epochs alone."""
    done, section = list[object](), {"status": "error", "reason": "no communication was seen"}

    def profiled(*_: object) -> tuple[dict[str, str], Any]:
        done.append("window")
        return section, SimpleNamespace(save=None)

    monkeypatch.setattr(window, "train", lambda *_: done.append("train"))
    monkeypatch.setattr(window, "profiled", profiled)
    recorder = SimpleNamespace(window=lambda section, _: done.append(section))
    scenario = window.Training(cast(Config, SimpleNamespace(profile=True, profile_steps=3)), job())
    scenario.trainer = cast(Trainer, SimpleNamespace(facts=lambda: {"done": len(done)}))
    scenario.rates = Rates(lambda _: 0.1)
    with pytest.raises(RunError, match="no communication was seen"):
        scenario.run(cast(Run, SimpleNamespace(open_checkpoints=lambda *_: None, recorder=recorder)))
    assert done == ["train", "window", section]
    assert scenario.facts() == {"done": 1}
